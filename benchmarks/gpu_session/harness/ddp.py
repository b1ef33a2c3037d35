import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp, copy, warnings
warnings.simplefilter("ignore")
def work(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2000
    dist.init_process_group("gloo", rank=rank, world_size=2)
    import transformers, peft, cute_ops_torch
    from cute_ops_torch import inductor
    from torch.nn.parallel import DistributedDataParallel as DDP
    from tests.torch.drawn_programs import enabled, only_the_pass, through_autograd
    torch.manual_seed(0)
    cfg = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=61, use_cache=False, attention_bias=True, mlp_bias=True)
    base = transformers.LlamaForCausalLM(cfg).train()
    with torch.no_grad():
        for p in base.parameters(): p.add_(0.05*torch.randn_like(p))
    tokens = torch.randint(0, 61, (4, 6))
    mine = tokens[rank*2:rank*2+2]
    def grads(m):
        return {n.replace("module.","").replace("_orig_mod.",""): p.grad.clone() for n,p in m.named_parameters() if p.grad is not None}
    def want(model):
        whole = copy.deepcopy(model)
        (sum(whole(input_ids=tokens[k*2:k*2+2], labels=tokens[k*2:k*2+2]).loss for k in (0,1))/2).backward()
        return grads(whole)
    def same(got, ref, what):
        assert got.keys()==ref.keys(), (what, got.keys()^ref.keys())
        worst = max(((got[k]-ref[k]).norm()/ref[k].norm().clamp_min(1e-3)).item() for k in ref)
        if rank==0: print(what, "worst", f"{worst:.2g}", dict(inductor.replaced), flush=True)
        assert worst < 1e-4, what
    def patched(m):
        m = copy.deepcopy(m); cute_ops_torch.patch(m); return m
    ref = want(base)
    m = patched(base); d = DDP(m)
    d(input_ids=mine, labels=mine).loss.backward(); same(grads(d), ref, "patched DDP")
    for static in (False, True):
        torch._dynamo.reset(); inductor.replaced.clear()
        d = DDP(copy.deepcopy(base), bucket_cap_mb=0.01, static_graph=static)
        with enabled():
            d2 = torch.compile(d, backend=through_autograd)
            for _ in range(2):
                d.zero_grad(); d2(input_ids=mine, labels=mine).loss.backward()
        left=[e for e in inductor.report() if e.what=="a graph"]; assert not left, left
        same(grads(d), ref, f"graph pass + compile(DDP) static={static}")
    torch._dynamo.reset(); inductor.replaced.clear()
    d = DDP(patched(base), bucket_cap_mb=0.01); d2=torch.compile(d, backend="aot_eager")
    d2(input_ids=mine, labels=mine).loss.backward(); same(grads(d), ref, "patched + compile(DDP)")
    # LoRA put on after the patch / before the pass, in DDP
    lc = peft.LoraConfig(r=2, target_modules=["q_proj","down_proj","lm_head"], init_lora_weights=False, bias="all")
    torch.manual_seed(1); adapted = peft.get_peft_model(copy.deepcopy(base), lc); ref = want(adapted)
    torch.manual_seed(1); a = peft.get_peft_model(patched(base), lc)
    with torch.no_grad():
        for (n,p),(k,q) in zip(a.named_parameters(), adapted.named_parameters()): p.copy_(q)
    d = DDP(a); d(input_ids=mine, labels=mine).loss.backward(); same(grads(d), ref, "LoRA on patched, DDP")
    torch._dynamo.reset(); inductor.replaced.clear()
    d = DDP(copy.deepcopy(adapted))
    with enabled():
        torch.compile(d, backend=through_autograd)(input_ids=mine, labels=mine).loss.backward()
    same(grads(d), ref, "graph pass + compile(DDP(LoRA))")
    from torch.distributed.fsdp import fully_shard
    torch._dynamo.reset(); inductor.replaced.clear()
    f = copy.deepcopy(adapted)
    for layer in f.get_base_model().model.layers: fully_shard(layer)
    fully_shard(f)
    with enabled():
        for layer in f.get_base_model().model.layers: layer.compile(backend=through_autograd)
        f(input_ids=mine, labels=mine).loss.backward()
    got = {n: p.grad.full_tensor() for n,p in f.named_parameters() if p.grad is not None}
    same(got, ref, "graph pass, layers compiled under FSDP2, LoRA")
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, (29471,), nprocs=2)
