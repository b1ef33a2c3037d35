import random, re, sys
from pathlib import Path
ids = [l for l in Path("ids2.txt").read_text().splitlines() if "::" in l]
ran = set(Path("/tmp/ran.txt").read_text().splitlines())
left = [i for i in ids if i not in ran]
def jax(i): return i.startswith("tests/jax") or "[jax" in i or "-jax" in i or "jax]" in i or "cute_ops_jax" in i
slow = {}
for f in Path("logs").glob("*.tsv"):
    for l in f.read_text().splitlines():
        if l[0] == "#": continue
        o, d, i = l.split("\t"); k = i.split("[")[0]; s = slow.setdefault(k, [0, 0]); s[0] += float(d); s[1] += 1
cost = {k: a / n for k, (a, n) in slow.items()}
big = [i for i in left if "test_torch_scale" in i]
rng = random.Random("second")
out = Path("ids"); [f.unlink() for f in out.glob("*.ids")]
T, J = int(sys.argv[1]), int(sys.argv[2])
total = {}
for name, n, some in (("torch", T, [i for i in left if not jax(i) and i not in big]), ("jax", J, [i for i in left if jax(i)])):
    hard = [i for i in some if cost.get(i.split("[")[0], 1) > 4]
    easy = [i for i in some if cost.get(i.split("[")[0], 1) <= 4]
    rng.shuffle(hard); hard.sort(key=lambda i: -cost.get(i.split("[")[0], 1))
    chunks = [easy[k:k+10] for k in range(0, len(easy), 10)]; rng.shuffle(chunks)
    for p in range(n):
        mine = hard[p::n] + [i for c in chunks[p::n] for i in c]
        (out / f"{name}{p}.ids").write_text("\n".join(mine) + "\n")
    print(name, len(some), "hard", len(hard), f"{sum(cost.get(i.split('[')[0], 1) for i in some):.0f} s")
if big: (out / "big.ids").write_text("\n".join(big) + "\n")
