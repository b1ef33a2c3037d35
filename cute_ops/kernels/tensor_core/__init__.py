"""Parts of kernels that multiply by Hopper's tensor cores: what products, attention, fp8 and grouped products share.

A kernel is written top down. Each layer uses those below it, and is a part that another kernel may take alone::

    launch        TMA tensors, tiled MMAs, grid                    GemmSm90.launch
    kernel        shared memory, pipelines, roles of warps         GemmSm90.kernel
    ---------------------------------------------------------------------------------------------------
    role: load    work tile -> stage acquired -> TMA               Mainloop.load, OperandTiles.load
    role: compute work tile -> stage waited for -> WGMMA           Mainloop.multiply
                  accumulators -> expression -> parts -> store     Store.store, EpiloguePart
    ---------------------------------------------------------------------------------------------------
    scheduler     which work tiles a cluster or warpgroup takes    scheduler.persistent
    pipeline      Producer.acquire_and_advance, Consumer.wait      pipeline.tma_pipeline
    barriers      whose turn it is to multiply (ping-pong)         barriers.OrderBarrier
    tma           atoms, stages <-> tiles of memory, multicast     tma.load_tensor, tma.tma_copy
    wgmma         A from shared memory or registers, zero_init     wgmma.tiled_mma, wgmma.multiply
    accumulators  coordinates, (rows, columns), next operand A     accumulators.AccumulatorTile
    shared        one struct of buffers, allocated by name         shared.SharedMemory
    ---------------------------------------------------------------------------------------------------
    integers      also for configs, without the compiler           shared_struct.SharedStruct, sizes

**Names.** As in CuTe: ``mX`` a tensor in memory, ``gX`` its tiles, ``sX`` stages in shared memory ``(rows, columns,
stages)``, ``rX`` registers; ``tXsX`` what a thread or copy has of ``sX``. Shapes stand in comments where a tensor is
made.

**Shared memory.** A kernel lists its :class:`Buffer` and mbarriers once, in a :class:`SharedStruct`. The config asks
it for its bytes when it chooses how many stages fit, the kernel for its tensors.

**Pipelines.** A participant carries its state: ``stage = producer.acquire_and_advance(); copy.load(at, stage)`` on
one side, ``stage = consumer.wait(); ...; consumer.release_and_advance()`` on the other. Loops carry participants if
they are local variables whose methods the loop itself calls. Several groups of warps may go round parts of one
pipeline.

**Accumulators.** :class:`AccumulatorTile` knows the row and column of each from ``partition_C`` of an identity
tensor, so it serves ``mma.sync`` and WGMMA, operands of 16 and of 8 bits. A :class:`Chunk` of them is computed at
once by :class:`cute_ops.kernels.emit.accumulators.AccumulatorEmitter`, which evaluates an expression with operands of
any coordinates; results may replace accumulators (``put``) and be the operand A of the next product
(``as_operand_a``).

**Epilogue parts.** Whoever wants more than an expression of a product writes a
:class:`cute_ops.kernels.gemm.parts.EpiloguePart`: buffers of its own, TMA of its own, and a method for the begin,
each subtile and the end of a tile.

``tests/ops/tensor_core_kernels.py`` has the shortest examples: attention's two products with an expression of the
scores between them, and a part that stores a second output.
"""
