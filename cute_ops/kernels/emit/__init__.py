"""An expression as device code: functions of its primitives, values in registers, stages of reductions."""
