import sys, torch, itertools
import cute_ops_torch
from cute_ops.plan import limit_static
limit_static(1<<30)
torch.manual_seed(0)
bad=[]
for xd,wd in itertools.product((torch.float32,torch.bfloat16),(torch.float32,)):
    for n in [1025,1027,1029,1030,1031,1283,1537,2049,2050,2051,3001,4097,4098,4099,5001,8193,10001,12289,16385,20001]:
        for m in (7,300):
            x=torch.randn(m,n,device="cuda",dtype=xd); w=torch.randn(n,device="cuda",dtype=wd)
            out=torch.ops.cute.rmsnorm(x,w)
            ref=(x.double()*torch.rsqrt(x.double().pow(2).mean(-1,keepdim=True)+1e-6)*w.double())
            err=((out.double()-ref).abs()/(ref.abs()+1e-3))
            tol=1e-4 if xd==torch.float32 else 2e-2
            wrong=(err>tol)
            if wrong.any():
                rows=wrong.any(1).nonzero().flatten().tolist(); cols=wrong[rows[0]].nonzero().flatten().tolist()
                ratio=(out[rows[0],cols[0]].double()/(ref[rows[0],cols[0]]/w[cols[0]].double()))
                near=[c for c in range(max(cols[0]-16,0),min(cols[0]+17,n)) if abs(w[c].double()-ratio)<1e-3*abs(ratio)]
                print(xd,wd,n,m,"wrong",int(wrong.sum()),"rows",rows[:8],len(rows),"cols",cols[:12],len(cols),"weight used is of column",near,flush=True)
                bad.append((n,m))
print("bad",len(bad))
