import random, statistics, sys, time
sys.path.insert(0, "benchmarks")
import csv
import torch
import torch.nn.functional as F
import bias_gradients
import cute_ops_torch as co
from cute_ops_torch.host.sampler import graph_sampler
from cute_ops_torch.tools import measure
from contextlib import nullcontext

OUT, SECONDS = sys.argv[1], float(sys.argv[2])
CUDA = torch.cuda.is_available()
begin = time.time()
file = open(f"{OUT}/bias_adaln.csv", "w", newline="")
out = csv.writer(file)
out.writerow(["what", "shape", "dtype", "contender", "us", "of_copy"])
rate = measure.copy_rate() if CUDA else 4200.0
print(f"copy {rate:.0f} GB/s", flush=True)
stream = torch.cuda.Stream() if CUDA else None


def made(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda" if CUDA else "cpu").to(dtype)


def times(sets, contenders):
    """Microseconds of each, in turns, in CUDA graphs."""
    samplers, found = {}, {}
    for name, function in contenders.items():
        with torch.cuda.stream(stream) if CUDA else nullcontext():
            for given in sets[:2]:
                function(*given)
    if not CUDA:
        return dict.fromkeys(contenders, 1.0)
    torch.cuda.synchronize()
    for name, function in contenders.items():
        calls = [lambda given=given, function=function: function(*given) for given in sets]
        samplers[name] = graph_sampler(calls, len(calls) * max(1, -(-8 // len(calls))), stream)
        found[name] = []
    names = list(samplers)
    for _ in range(9):
        for name in names:
            found[name].append(samplers[name]())
        names.reverse()
    return {name: statistics.median(each) for name, each in found.items()}


def write(what, shape, moved, found, against=None):
    for name, us in found.items():
        out.writerow([what, shape, "bfloat16", name, f"{us:.2f}", f"{moved / us / 1e3 / rate:.3f}"])
    file.flush()
    ours = found["ours"]
    others = {k: v for k, v in found.items() if k not in ("ours", "copy")}
    best = min(others.values()) if others else float("nan")
    note = f", {ours / found['copy']:.2f} of a copy's time" if "copy" in found else ""
    print(f"{what} {shape}: ours {ours:.1f} us, {moved / ours / 1e3 / rate:.2f} of the copy rate{note}; " + ", ".join(f"{k} {v:.1f}" for k, v in others.items()) + f" -> {best / ours:.2f}", flush=True)


def biases():
    for m, n in bias_gradients.draw(20261129, 5):
        if not CUDA:
            m, n = 70, n // 64
        parts = bias_gradients.contenders(m, n)
        count = max(2, -(-150_000_000 // (2 * m * n)))
        with torch.no_grad():
            sets = [(made(m, n), made(n), torch.empty(m, n, device="cuda" if CUDA else "cpu", dtype=torch.bfloat16)) for _ in range(count)]
            functions = parts["sum"][1]
            found = times(sets, {"ours": lambda d, b, c: functions["ours"](d, b), "torch": lambda d, b, c: d.sum(0), "copy": lambda d, b, c: c.copy_(d)})
            write("bias gradient", f"{m}x{n}", 2 * m * n, found)
            sets = [(made(m, n), made(n), made(m, n)) for _ in range(count)]
            functions = parts["gelu, sum"][1]
            found = times(sets, {"ours": functions["ours"], "torch": functions["torch"]})
            write("gelu gradient, bias gradient", f"{m}x{n}", 6 * m * n, found)


def modulate(xp, x, gain, shift):
    return x * (1.0 + gain) + shift


def gated(xp, x, gate, residual):
    return residual + gate * x


def norm_modulate(xp, x, gain, shift):
    y = x - xp.mean(x, axis=-1, keepdims=True)
    return y * xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * (1.0 + gain) + shift


def gate_norm(xp, x, gate, residual, weight):
    y = residual + gate * x
    return y * xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * weight, y


def plain(function):
    def call(*tensors):
        found = function(Torch, *(t.float() for t in tensors))
        if isinstance(found, tuple):
            return tuple(f.to(tensors[0].dtype) for f in found)
        return found.to(tensors[0].dtype)

    return call


class Torch:
    mean, rsqrt = staticmethod(torch.mean), staticmethod(torch.rsqrt)

    @staticmethod
    def mean(x, axis, keepdims):
        return x.mean(axis, keepdim=keepdims)


SHAPES = {"modulate": "xgg", "gated": "xgx", "norm_modulate": "xgg", "gate_norm": "xgxw"}


def adaln():
    rng = random.Random(541706)
    sizes = [(32, 1024, 1152)] + [(rng.choice((4, 8, 16, 64)), rng.choice((256, 1024, 1025, 4096)), rng.choice((768, 1152, 1408, 2047, 3072, 5120))) for _ in range(2)]
    for function in (modulate, gated, norm_modulate, gate_norm):
        ours = co.fused(function)
        compiled = torch.compile(plain(function), dynamic=False)
        for b, length, n in sizes:
            if time.time() - begin > SECONDS:
                print("out of time")
                return
            length = max(64, min(length, 200_000_000 // (b * n)))
            if not CUDA:
                b, length, n = 2, 5, 24

            def one(letter):
                return {"x": made(b, length, n), "g": made(b, 1, n), "w": made(n)}[letter]

            tensors = tuple(one(letter) for letter in SHAPES[function.__name__])
            big = b * length * n * 2
            count = max(2, min(6, -(-150_000_000 // big)))
            sets = [tensors] + [tuple(t.clone() for t in tensors) for _ in range(count - 1)]
            with torch.no_grad():
                outs = ours(*tensors)
                outs = outs if isinstance(outs, tuple) else (outs,)
                exact = plain(function)(*(t.double() for t in tensors))
                exact = exact if isinstance(exact, tuple) else (exact,)
                error = max((a.double() - e).abs().max().item() / e.abs().max().item() for a, e in zip(outs, exact))
                if not error < 1e-2:
                    print("WRONG", function.__name__, b, length, n, error)
                tiles = sum(letter == "x" for letter in SHAPES[function.__name__])
                write(f"{function.__name__} forward", f"{b}x{length}x{n}", big * (tiles + len(outs)), times(sets, {"ours": ours, "torch.compile": compiled}))

            def backward(call):
                leaves = [tuple(t.detach().requires_grad_() for t in each) for each in sets]
                held = []
                with torch.cuda.stream(stream) if CUDA else nullcontext():
                    for each in leaves:
                        o = call(*each)
                        o = o if isinstance(o, tuple) else (o,)
                        held.append((o, each, tuple(torch.randn_like(t) for t in o)))
                if CUDA:
                    torch.cuda.synchronize()
                return held

            mine, theirs = backward(ours), backward(compiled)
            index = {id(s[0]): i for i, s in enumerate(sets)}

            def run(held):
                return lambda *given: torch.autograd.grad(*held[index[id(given[0])]], retain_graph=True)

            with torch.cuda.stream(stream) if CUDA else nullcontext():
                got = run(mine)(*sets[0])
            if CUDA:
                torch.cuda.synchronize()
            for held in mine[:1]:
                wide = tuple(t.double().requires_grad_() for t in sets[0])
                o = plain(function)(*wide)
                o = o if isinstance(o, tuple) else (o,)
                ref = torch.autograd.grad(o, wide, [c.double() for c in held[2]])
                error = max((a.double() - e).abs().max().item() / e.abs().max().item() for a, e in zip(got, ref))
                if not error < 2e-2:
                    print("WRONG gradient", function.__name__, b, length, n, error)
            moved = {"modulate": 3, "gated": 3, "norm_modulate": 3, "gate_norm": 6}[function.__name__] * big
            write(f"{function.__name__} backward", f"{b}x{length}x{n}", moved, times(sets, {"ours": run(mine), "torch.compile": run(theirs)}))
            del mine, theirs, got
            if CUDA:
                torch.cuda.empty_cache()


from torch._functorch import config as functorch_config
functorch_config.donated_buffer = False
for part in (biases, adaln):
    try:
        part()
    except Exception as failure:
        import traceback
        traceback.print_exc()
print(f"{time.time() - begin:.0f} s")
