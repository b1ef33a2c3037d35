"""Programs of models in many transformations: python more.py FIRST COUNT"""
import sys, traceback
from functools import partial
import jax, jax.numpy as jnp, numpy as np
import cute_ops_jax
from cute_ops.testing import limits_of
from tests.jax import drawn_graphs as dg
from tests.jax.test_jax_fuse_named import with_rule, of_its_own, OWN
fuse = cute_ops_jax.fuse
B,T,N,V,E,H = 2,4,8,8,4,2
class _B: pass
OWN2 = with_rule(lambda d,r,p,z: 2*d*((1+z)*p-r))
SHAPES = {"x":(B,T,N),"y":(B,T,N),"router":(N,E),"up":(E,N,12),"gate":(E,N,12),"down":(E,12,N),"weight":(N,),"bias":(V,),"head":(N,V),
 "layers":(2,N,N),"a":(N,),"wq":(N,H*16),"wk":(N,H*16),"wv":(N,H*16),"wo":(H*16,N),"w1":(N,2*N),"w2":(N,N),"conv":(3,N),"mods":(B,3*N)}
def norm(run,x,kind,w):
    x=run.wide(x)
    if kind==1: x=x-x.mean(-1,keepdims=True)
    y=x*jax.lax.rsqrt(jnp.mean(x*x,-1,keepdims=True)+1e-3)
    return run.narrow(y)*w if kind!=2 else run.narrow(y*(1+run.wide(w)))
class Run(dg.Run):
    def __init__(self,arrays,dtype): self.arrays,self.dtype=arrays,dtype
def f64(run): return run.dtype==jnp.float64
def moe(rng):
    kind,top,act=(int(k) for k in rng.integers(0,[5,2,3])); acts=(jax.nn.silu,jax.nn.gelu,jnp.tanh)[act]; ids_=rng.integers(0,E,(B,T,2))
    def part(run,x,y):
        ids=ids_[:x.shape[0]]
        logits=run.wide(x@run["router"])
        p=jax.nn.softmax(logits,-1)
        if kind in (0,1):  # choices known, weights of the router
            sel=jnp.asarray(ids[...,:1+top])
            w=jnp.take_along_axis(p,sel,-1); w=w/w.sum(-1,keepdims=True)
            hot=jax.nn.one_hot(sel,E,dtype=p.dtype)
            comb=(hot*w[...,None]).sum(-2)
        else: comb=p
        if kind in (0,2):
            h=acts(jnp.einsum("btn,enf->btef",x,run["gate"]))*jnp.einsum("btn,enf->btef",x,run["up"])
            return run.narrow(jnp.einsum("btef,efn,bte->btn",run.wide(h),run.wide(run["down"]),comb))
        if kind==1:
            out=0
            for e in range(E):
                out=out+comb[...,e:e+1]*run.wide((acts(x@run["gate"][e])*(x@run["up"][e]))@run["down"][e])
            return run.narrow(out)
        if kind==3:
            one=lambda g,u,d: (acts(x@g)*(x@u))@d
            outs=jax.vmap(one)(run["gate"],run["up"],run["down"])
            return run.narrow(jnp.einsum("ebtn,bte->btn",run.wide(outs),comb))
        disp=jax.nn.one_hot(jnp.asarray(ids[...,0]),E,dtype=x.dtype)
        xs=jnp.einsum("bte,btn->ebtn",disp,x)
        hs=acts(jnp.einsum("ebtn,enf->ebtf",xs,run["up"]))
        ys=jnp.einsum("ebtf,efn->ebtn",hs,run["down"])
        aux=(comb.mean((0,1))*run.wide(disp).mean((0,1))).sum()*E
        return run.narrow(jnp.einsum("ebtn,bte->btn",run.wide(ys),run.wide(disp)*comb)+aux)
    return f"moe{kind}",part
def ssm(rng):
    kind=int(rng.integers(0,4))
    def part(run,x,y):
        dt=jax.nn.softplus(run.wide(y)); a=-jnp.exp(run.wide(run["a"])*0.3); dec=jnp.exp(dt*a); u=dt*run.wide(x)
        if kind==0:
            h=jax.lax.associative_scan(lambda l,r:(l[0]*r[0],l[1]*r[0]+r[1]),(dec,u),axis=1)[1]
        elif kind==1:
            def body(s,e): s=s*e[0]+e[1]; return s,s
            h=jax.lax.scan(body,jnp.zeros_like(u[:,0]),(dec.swapaxes(0,1),u.swapaxes(0,1)))[1].swapaxes(0,1)
        elif kind==2:
            def body(i,c):
                s,o=c; s=s*dec[:,i]+u[:,i]; return s,o.at[:,i].set(s)
            h=jax.lax.fori_loop(0,T,body,(jnp.zeros_like(u[:,0]),jnp.zeros_like(u)))[1]
        else:
            cs=jnp.cumsum(dt*a,1); L=jnp.where(jnp.tril(jnp.ones((T,T),bool))[...,None],jnp.exp(cs[:,:,None]-cs[:,None]),0)
            h=jnp.einsum("btsn,bsn->btn",L,u)
        z=jax.nn.silu(run.wide(y))
        return norm(run,run.narrow(h*z),0,run["weight"])
    return f"ssm{kind}",part
def conv(rng):
    def part(run,x,y):
        p=jnp.pad(x,((0,0),(2,0),(0,0)))
        return jax.nn.silu(sum(p[:,k:k+T]*run["conv"][k] for k in range(3)))+y
    return "conv",part
def attn(rng):
    kind,mask=(int(k) for k in rng.integers(0,[3,3]))
    def part(run,x,y):
        q,k,v=((s@run[w]).reshape(x.shape[0],-1,H,16) for s,w in ((x,"wq"),(y,"wk"),(y,"wv")))
        if kind==1:
            ang=(jnp.arange(T)[:,None]*0.5**jnp.arange(8)).astype(run.wide(x).dtype)[None,:,None]
            rot=lambda t:(lambda a,b:run.narrow(jnp.concatenate([a*jnp.cos(ang)-b*jnp.sin(ang),b*jnp.cos(ang)+a*jnp.sin(ang)],-1)))(*jnp.split(run.wide(t),2,-1))
            q,k=rot(q),rot(k)
        if kind==2:
            out=jax.nn.dot_product_attention(q,k,v,is_causal=mask==1)
        else:
            s=run.wide(jnp.einsum("bqhd,bkhd->bhqk",q,k))*0.25
            if mask==1: s=jnp.where(jnp.tril(jnp.ones((T,T),bool)),s,-1e9)
            if mask==2: s=jnp.where((run["x"][:x.shape[0],:,0]>-0.5)[:,None,None]|jnp.eye(T,dtype=bool),s,-jnp.inf)
            out=jnp.einsum("bhqk,bkhd->bqhd",run.narrow(jax.nn.softmax(s,-1)),v)
        return x+out.reshape(x.shape[0],T,-1)@run["wo"]
    return f"attn{kind}{mask}",part
def mlp(rng):
    kind=int(rng.integers(0,4))
    def part(run,x,y):
        z=norm(run,x,kind%3,run["weight"])
        if kind==0:
            g,u=jnp.split(z@run["w1"],2,-1); return x+(jax.nn.silu(g)*u)@run["w2"]
        if kind==1: return y+jax.nn.gelu(z@run["w2"]+run["bias"])@run["layers"][0]
        if kind==2:
            s,c,g=jnp.split(run["mods"][:,None],3,-1); return x+g*jnp.tanh(z*(1+c)+s)
        t=x@run["w2"]+y; return norm(run,t,0,run["weight"])+t
    return f"mlp{kind}",part
def loss(rng):
    form,head,mask,metric=(int(k) for k in rng.integers(0,[9,5,4,4]))
    t=rng.integers(0,V,(B,T)).astype(np.int32)
    if rng.random()<0.3: t[0,0]=rng.choice([-100,V,V+3,-1])
    seen=rng.random((B,T))<0.7
    def part(run,x,y):
        tt,ss=jnp.asarray(t)[:x.shape[0]],jnp.asarray(seen)[:x.shape[0]]
        l=jnp.matmul(x,run["head"],preferred_element_type=run.wide(x).dtype) if wide_ else x@run["head"]
        if head==1: l=l+run["bias"].astype(l.dtype)
        if head==2: l=jnp.tanh(l/3)*3
        if head==3: l=l.reshape(-1,V); tt,ss=tt.reshape(-1),ss.reshape(-1)
        if head==4: l=l[:,:-1]; tt,ss=tt[:,1:],ss[:,1:]
        w=run.wide(l)
        hot=jax.nn.one_hot(tt,V,dtype=w.dtype)
        soft=jnp.where(tt[...,None]==jnp.arange(V),0.93,0.01).astype(w.dtype)
        z=None
        safe=jnp.clip(tt,0,V-1)
        if form==0: e,z=OWN(w,hot,1e-2)
        elif form==1: e,z=OWN(w,soft,1e-2)
        elif form==2: e,z=OWN(w,hot,0.0)
        elif form==3: e,z=OWN2(w,hot,1e-2)
        elif form==4: e=-jnp.take_along_axis(jax.nn.log_softmax(w),safe[...,None],-1)[...,0]
        elif form==5: e=-(soft*jax.nn.log_softmax(w)).sum(-1)
        elif form==6: e=jax.nn.logsumexp(w,-1)-(hot*w).sum(-1); z=jax.nn.logsumexp(w,-1)
        elif form==7: e=of_its_own(w,hot,1e-2)[0]
        else: e=-jnp.take_along_axis(jax.nn.log_softmax(w),tt[...,None],-1,mode="clip")[...,0]
        if mask==0: total=(e*ss).sum()/ss.sum()
        elif mask==1: total=jnp.where(ss,e,0).sum()/4
        elif mask==2: total=e.mean()
        else: total=(e*jnp.linspace(0.5,1.5,e.size,dtype=e.dtype).reshape(e.shape)).sum()
        if metric==1 and z is not None: total=total+0.1*z.mean()
        if metric==2: run.extra.append(jnp.argmax(l if rng_cast else w,-1)==tt)
        if metric==3 and z is not None: run.extra.append(z)
        return y+run.narrow(total)
    rng_cast=bool(rng.random()<0.5); wide_=bool(rng.random()<0.3)
    return f"loss{form}{head}{mask}{metric}",part
PARTS=[moe,ssm,conv,attn,mlp,loss,loss,moe]
def wrapped(rng,part):
    """A part in a transformation: of (run, x, y)."""
    kind=int(rng.integers(0,12)); vma=bool(rng.random()<0.5); pol=(jax.checkpoint_policies.dots_saveable,jax.checkpoint_policies.nothing_saveable,None)[int(rng.integers(0,3))]
    def run_it(run,x,y):
        if kind==0: return jax.jit(lambda x,y:part(run,x,y))(x,y)
        if kind==1: return jax.checkpoint(lambda x,y:part(run,x,y),policy=pol)(x,y)
        if kind==2: return jax.lax.scan(lambda c,_:(part(run,c,y),None),x,None,length=2)[0]
        if kind==3: return jax.lax.scan(jax.checkpoint(lambda c,_:(part(run,c,y)*0.5,None),policy=pol),x,None,length=2,reverse=True)[0]
        if kind==4: return jax.lax.cond(run["weight"][0]>0,lambda x,y:part(run,x,y),lambda x,y:x*y,x,y)
        if kind==5: return jax.lax.fori_loop(0,2,lambda i,c:part(run,c,y)*0.5,x)
        if kind==6:
            def one(x,y,arrays):
                r=Run(arrays,run.dtype); r.extra=[]; return run.narrow(part(r,x,y))
            f=jax.custom_vjp(one); f.defvjp(lambda x,y,a:(one(x,y,a),(x,y,a)),lambda s,d:(d*s[1],d+s[0],jax.tree.map(lambda a:a*d.sum(),s[2]))); return jnp.tanh(f(x,y,dict(run.arrays)))*x
        if kind==7:
            mesh=jax.make_mesh((2,),("k",),axis_types=(jax.sharding.AxisType.Auto,),devices=jax.devices()[:2]); S=jax.sharding.PartitionSpec
            arrays=dict(run.arrays)
            def body(x,y,arrays):
                r=Run({**arrays,"x":x,"y":y},run.dtype); r.extra=[]; return run.narrow(part(r,x,y))
            arrays["mods"]=arrays["mods"][:1]
            return jax.shard_map(body,mesh=mesh,in_specs=(S("k"),S("k"),S()),out_specs=S("k"),check_vma=vma)(x,y,arrays)
        if kind==8: return jax.jit(lambda x,y:part(run,x,y),donate_argnums=(0,))(x+0,y)
        if kind==9:
            o,back=jax.vjp(lambda x:part(run,x,y),x); return run.narrow(jnp.tanh(run.wide(back(jnp.tanh(o))[0])))
        if kind==10: return part(run,x,y)+jax.lax.stop_gradient(part(run,y,x))
        return part(run,x,y)
    return ("jit","ckpt","scan","ckscan","cond","fori","vjp","shmap","donate","innervjp","twice","plain")[kind], run_it, kind in (0,1,2,3,4,5,6,7,8,9,10)
def program(rng):
    steps=[];text=[]
    for k in range(int(rng.integers(1,3))):
        name,part=PARTS[int(rng.integers(0,len(PARTS)))](rng)
        kind,fn,inside=wrapped(rng,part)
        steps.append((fn,inside)); text.append(f"{kind}({name})")
    def f(arrays,dtype):
        run=Run(arrays,dtype); run.extra=[]; x,y=arrays["x"],arrays["y"]; keep=[]
        for fn,inside in steps:
            run.extra=[]
            out=run.narrow(fn(run,x,y))
            if not inside: keep+=run.extra
            x,y=out,x
        return x, tuple(keep)
    return f," ".join(text)
MODES=("inside","around","vmap","exact","sharded","jvp","hvp","linearize","x64","export","nested","donate","inside","fwdonly")
def check(seed):
    rng=np.random.default_rng([seed,91])
    f,text=program(rng)
    dtype=("float32","bfloat16","float32","float16")[seed%4]
    mode=MODES[int(rng.integers(0,len(MODES)))]
    if mode in ("jvp","hvp","linearize","x64","export"): dtype="float32"
    cot=rng.standard_normal((B,T,N)).astype(np.float32)
    def draw(): return {k:(rng.standard_normal(s)*(1 if k in "xy" else 0.4)).astype(np.float32) for k,s in SHAPES.items()}
    arrays={k:jnp.asarray(v).astype(dtype) for k,v in draw().items()}
    tang={k:jnp.asarray(v).astype(dtype) for k,v in draw().items()}
    def total(a,dt):
        o,keep=f(a,dt); w=jnp.promote_types(dt,jnp.float32)
        return jnp.sum(o.astype(w)*cot),(o,keep)
    dt=jnp.dtype(dtype)
    grads=jax.grad(total,has_aux=True)
    nongrad = "vjp(" in text  # custom_vjp has no forward mode
    made={}
    def both(a,d):
        if d not in made: made[d]=build(d)
        return made[d](a)
    def build(d):
        tg={k:v.astype(d) for k,v in tang.items()}
        if mode in ("jvp","linearize"): fn=lambda a: jax.jvp(lambda a: f(a,d)[0],(a,),(tg,))
        elif mode=="hvp": fn=lambda a: jax.jvp(jax.grad(lambda a: total(a,d)[0]),(a,),(tg,))[1]
        elif mode=="fwdonly": fn=lambda a:f(a,d)
        else: fn=lambda a:grads(a,d)
        return jax.jit(fn,compiler_options=dg.QUICK)
    what=f"seed {seed} {dtype} {mode}: {text}"
    if mode in ("jvp","hvp","linearize") and ("vjp(" in text or "loss0" in text or "loss1" in text or "loss2" in text or "loss3" in text): mode="inside"
    c=partial(jax.jit,compiler_options=dg.QUICK)
    L=lambda a: total(a,dt)
    if mode=="around": got=c(fuse(lambda a:grads(a,dt)))(arrays)
    elif mode=="vmap":
        st=jax.tree.map(lambda a:jnp.stack([a*0.5,a]),arrays)
        got=jax.tree.map(lambda a:a[1],c(jax.vmap(jax.grad(fuse(L),has_aux=True)))(st))
    elif mode=="exact": got=c(jax.grad(fuse(L,exact=True),has_aux=True))(arrays)
    elif mode=="sharded": got=c(jax.grad(fuse(L),has_aux=True))(dg._shared(arrays))
    elif mode=="jvp": got=c(fuse(lambda a: jax.jvp(lambda a:f(a,dt)[0],(a,),(tang,))))(arrays)
    elif mode=="linearize":
        def lin(a):
            o,g=jax.linearize(lambda a:f(a,dt)[0],a); return o,g(tang)
        got=c(fuse(lin))(arrays)
    elif mode=="hvp": got=c(fuse(lambda a: jax.jvp(jax.grad(lambda a:total(a,dt)[0]),(a,),(tang,))[1]))(arrays)
    elif mode=="x64":
        with jax.enable_x64(True): got=c(jax.grad(fuse(L),has_aux=True))(arrays)
    elif mode=="export":
        e=jax.export.export(jax.jit(jax.grad(fuse(L),has_aux=True)))(arrays); got=jax.export.deserialize(e.serialize()).call(arrays)
    elif mode=="nested": got=c(jax.grad(fuse(jax.jit(fuse(L))),has_aux=True))(arrays)
    elif mode=="donate": got=jax.jit(jax.grad(fuse(L),has_aux=True),donate_argnums=0,compiler_options=dg.QUICK)(jax.tree.map(jnp.array,arrays))
    elif mode=="fwdonly": got=c(fuse(lambda a:f(a,dt)))(arrays)
    else: got=c(jax.grad(fuse(L),has_aux=True))(arrays)
    measured=dg._measured(both,arrays,dtype)
    def cmp(tol):
        gl=[np.asarray(a) for a in jax.tree.leaves(got)]
        for i,(a,b,low,t) in enumerate(zip(gl,measured[2],measured[1],tol,strict=True)):
            if a.dtype==bool or (np.isnan(low).any() and not np.isnan(b).any()): continue
            if mode!="x64": assert a.dtype==low.dtype,(what,i,a.dtype,low.dtype)
            dg.compare_one(f"{what}, result {i}",a,b,t)
    try: cmp(limits_of(*measured))
    except AssertionError:
        many=[draw() for _ in range(32)]
        more=[]
        for one in many:
            a={k:jnp.asarray(v).astype(dtype) for k,v in one.items()}
            more.append(dg._measured(both,a,dtype))
        cmp(limits_of(*measured,iter(more)))
    return what
if __name__=="__main__":
    first,count=map(int,sys.argv[1:3]); wrong=0
    for seed in range(first,first+count):
        try: check(seed)
        except Exception as e:
            wrong+=1; print(f"seed {seed}: {type(e).__name__}: {str(e)[:700]}",flush=True)
            if "-v" in sys.argv: traceback.print_exc()
    print(f"{count} programs from {first}, {wrong} wrong",flush=True)
