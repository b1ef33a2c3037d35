# LIMIT 35
# Bias gradients beside a copy of dout; activation's gradient with bias gradient by the copy rate; adaLN's expressions.
python3 $REQ/bias.py $OUT_DIR 30
