"""Patched + compiled on fake CUDA tensors: autocast, checkpointing, dynamic, changing lengths, no labels."""
import sys, time, traceback, torch
sys.path.insert(0, "benchmarks")
torch.cuda.get_device_capability = lambda *a: (9, 0)
from torch._subclasses.fake_tensor import FakeTensorMode
import model_steps, cute_ops_torch, transformers, contextlib
from torch._dynamo.utils import counters
names = sys.argv[1].split(",")
def fresh(name, patched, ckpt):
    shape = model_steps.SHAPES[name]
    K = getattr(transformers, shape.kind) if isinstance(shape.kind, str) else shape.kind
    model = K(K.config_class(**{**shape.config, **shape.small})).to(torch.bfloat16).train()
    if ckpt: model.gradient_checkpointing_enable({"use_reentrant": False})
    if patched: cute_ops_torch.patch(model)
    return model, shape
def fake(t): return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") if isinstance(t, torch.Tensor) else t
for n in names:
  for label, opts in {"plain": {}, "dynamic": {"dynamic": True}, "lengths": {"lengths": True}, "nolabels": {"nolabels": True}, "ckpt": {"ckpt": True}, "autocast": {"autocast": True}, "eval": {"eval": True}}.items():
    if len(sys.argv) > 2 and label not in sys.argv[2].split(","): continue
    torch._dynamo.reset(); counters.clear(); t = time.time()
    try:
        model, shape = fresh(n, True, opts.get("ckpt"))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            for m in model.modules():
                for k, p in list(m._parameters.items()):
                    if p is not None: m._parameters[k] = torch.nn.Parameter(fake(p.detach()) if not opts.get("autocast") else torch.empty(p.shape, device="cuda"))
                for k, p in list(m._buffers.items()):
                    if p is not None: m._buffers[k] = fake(p)
            if hasattr(model, "tie_weights"): model.tie_weights()
            if opts.get("eval"): model.eval()
            run = torch.compile(model, backend="eager", dynamic=opts.get("dynamic"))
            for b, l in ((2, 24), (2, 24), *(((3, 20), (4, 17)) if opts.get("lengths") or opts.get("dynamic") else ())):
                inputs = shape.inputs(model.config, b, l, torch.device("cpu"))
                if opts.get("nolabels"): inputs.pop("labels"); inputs |= {"decoder_input_ids": torch.ones(b, l, dtype=torch.long)} if n in ("Whisper-large", "T5") else {}
                inputs = {k: fake(v) for k, v in inputs.items()}
                with torch.autocast("cuda", torch.bfloat16) if opts.get("autocast") else contextlib.nullcontext():
                    run(**inputs)
        print(f"{n:14} {label:9} ok graphs {counters['stats'].get('unique_graphs')} breaks {[k[:60] for k in counters['graph_break']]} {time.time()-t:.0f}s", flush=True)
    except Exception as e:
        traceback.print_exc()
        print(f"{n:14} {label:9} FAILED {type(e).__name__} {str(e)[:400]} {time.time()-t:.0f}s", flush=True)
