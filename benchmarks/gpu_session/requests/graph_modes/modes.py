"""Drawn graphs under reduce-overhead and max-autotune with both passes and real kernels, beside eager in float64."""
import argparse, collections, contextlib, io, json, os, subprocess, sys, time, traceback

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=120)
parser.add_argument("--workers", type=int, default=14)
parser.add_argument("--worker", type=int, default=-1)
parser.add_argument("--first", type=int, default=610000)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default=".")
parser.add_argument("--seed", type=int, default=-1)
args = parser.parse_args()
start = float(os.environ.setdefault("MODES_START", str(time.time())))


def main():
    here = [sys.executable, "-u", "-W", "ignore", __file__, *sys.argv[1:]]
    logs = [open(f"{args.out}/modes_{k}.log", "w") for k in range(args.workers)]
    runs = [subprocess.Popen([*here, "--worker", str(k)], stdout=log, stderr=subprocess.STDOUT) for k, log in enumerate(logs)]
    for run in runs:
        try:
            run.wait(timeout=max(1, args.seconds + 10 - (time.time() - start)))
        except subprocess.TimeoutExpired:
            run.kill()
    counts, put, wrong = collections.Counter(), collections.Counter(), []
    for k in range(args.workers):
        for line in open(f"{args.out}/modes_{k}.log"):
            if line.startswith("{"):
                each = json.loads(line)
                counts[each["mode"], each["how"]] += 1
                put.update(each["put"])
                if each["how"] not in ("right", "refused"):
                    wrong.append(each)
    print("graphs by mode and outcome:", dict(counts))
    print("put in:", dict(put))
    for each in wrong:
        print(json.dumps(each)[:900])
    ended = [run.returncode for run in runs]
    print("workers ended with", ended)
    if not counts:
        print(open(f"{args.out}/modes_0.log").read()[-3000:])


def worker():
    import torch

    import cute_ops_torch.inductor as inductor
    from cute_ops_torch.inductor import choice
    from tests.torch import drawn_graphs, drawn_programs

    cuda = args.device == "cuda"
    if cuda:
        for module in (drawn_graphs, drawn_programs):
            module.N, module.H = 256, 64
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fallback_random = True
    torch._inductor.config.max_autotune_gemm_backends = "ATEN"
    # A failed compile is an error, not a fall back to eager.
    torch._dynamo.config.suppress_errors = False
    expected_gain = choice.expected_gain

    class Graph(drawn_graphs.DrawnGraph):
        def inputs(self, b, s, dtype=None):
            with torch.device(args.device):
                return super().inputs(b, s, dtype)

    def off(got, want):
        return drawn_graphs._off(got, want)

    def compiled(drawn, mode, ours):
        torch._dynamo.reset()
        if cuda:
            torch.cuda.synchronize()
        with inductor.enable(devices=(args.device,), exact=drawn.exact) if ours else contextlib.nullcontext():
            inductor.replaced.clear()
            made = torch.compile(drawn.__call__, mode=mode, fullgraph=True, dynamic=(drawn.dynamic and not drawn.marked) or None)

            def run(*given):
                torch.compiler.cudagraph_mark_step_begin()
                return made(*given)

            found = [t.clone() for t in drawn.results(run)]
            graphs = [entry for entry in inductor.report() if entry.what == "a graph"] if ours else []
        assert not graphs, f"a graph stays: {graphs}"
        return found, dict(inductor.replaced) if ours else {}

    def check(seed):
        mode = ("reduce-overhead", "max-autotune")[seed % 2] if cuda else None
        drawn = Graph(seed)
        said = io.StringIO()
        drawn.twice = drawn.twice and (mode != "reduce-overhead" or seed % 3 == 0)
        drawn.calls = 4 if mode == "reduce-overhead" else 2
        with contextlib.redirect_stdout(said):
            if cuda:
                drawn.sizes = [(2 * b, 16 * s + (s > 1)) for b, s in drawn.sizes][: 2 if mode else 3]
            drawn.sizes = [size for size in drawn.sizes if drawn.runs(size)]
        result = {"seed": seed, "mode": str(mode), "how": "right", "put": {}, "graph": repr(drawn)}
        if not drawn.sizes:
            return result | {"how": "refused"}
        random = not {*drawn_graphs.RANDOM}.isdisjoint(drawn.steps)
        want = drawn.results(drawn)
        right = want if random else drawn.results(drawn, torch.float64)
        # Half of the graphs take our products whatever the model expects of them.
        choice.expected_gain = (lambda *given: 1.0) if seed % 4 < 2 else expected_gain
        try:
            got, put = compiled(drawn, mode, True)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[-500:]}"
            try:
                compiled(drawn, mode, False)
            except Exception as other:
                return result | {"how": "refused", "why": f"{type(other).__name__}"}
            return result | {"how": "raised", "why": text}
        result["put"] = put
        assert len(got) == len(want)
        plain = None
        jumps = not {*drawn_graphs.JUMPS}.isdisjoint(drawn.steps) or (random and drawn.rounds)
        for i, (g, w, r) in enumerate(zip(got, want, right)):
            if (g.dtype, g.shape) != (w.dtype, w.shape):
                return result | {"how": "wrong", "why": f"value {i}: {g.dtype} {tuple(g.shape)}"}

            def allowed(of):
                floor = (0.15 if jumps else 0.02) if drawn.rounds else (2e-3 if jumps else 5e-5)
                return 3 * of + floor

            if (error := off(g, r)) > allowed(off(w, r)):
                if plain is None:
                    plain = compiled(drawn, mode, False)[0]
                p = plain[i]
                why = f"value {i} of {len(got)}: {error:.3g} off, eager {off(w, r):.3g}, plain compile {off(p, r):.3g}, ours to plain {off(g, p):.3g}"
                if off(g, p) <= allowed(0) or error <= allowed(off(p, r)):
                    result |= {"how": "as plain compile", "why": why}
                    continue
                return result | {"how": "wrong", "why": why}
        return result

    if args.seed >= 0:
        print(json.dumps(check(args.seed), indent=1))
        return
    seed = args.first + args.worker
    while time.time() - start < args.seconds - 12:
        began = time.time()
        try:
            made = check(seed)
        except Exception as error:
            made = {"seed": seed, "mode": "harness", "how": "failed", "put": {}, "why": f"{type(error).__name__}: {str(error)[:300]} {traceback.format_exc()[-400:]}"}
            if cuda and "CUDA" in str(error):  # the process is broken
                print(json.dumps(made), flush=True)
                return
        print(json.dumps(made | {"s": round(time.time() - began, 1)}), flush=True)
        seed += args.workers


if __name__ == "__main__":
    if args.worker >= 0 or args.seed >= 0:
        worker()
    else:
        main()
