"""The texts of what the proof refuses."""

CHOSEN = """\
{kind} over {axis!r}{at} is in a {where} that replicas decide separately: the condition{line} \
differs between them, so some would wait for others that never arrive, or exchange unrelated \
values. {advice}"""

MOVE_OUT = """\
Move it out of the {where}; or make the condition the same everywhere, for example with \
`lax.pmax(..., {axis!r})`; or compute both sides and select with `jnp.where`. If the condition is \
the same but jaxcoll cannot prove it, mark it: `jc.same(...)`."""

SOLVER = """\
This is a backward pass: the cotangents of what the {where} computed come from each replica's own \
loss. If it solves the same problem on every replica, average the cotangent of its solution: use \
`jc.sync_in_backward(solution, {axis!r})` in the solution's place."""

OWN_GRADIENT = """ \
If the condition depends on a gradient taken inside{gradient}: it is that of each replica's own \
loss, even if the loss is averaged. Take it of `jc.mean_loss(loss, {axis!r})`, or average it."""

DIFFERENT = """\
`{caller}` over {axis!r}: {leaf} must be the same on every replica, but differs between them, or \
jaxcoll cannot prove that it is the same. If it is, mark it with `jc.same`, or make it so with \
`jc.broadcast`; if it should differ (an expert, the batch), take its gradient with `jax.grad`, or \
pass it as `Shards`."""

WHOLE = """\
`{caller}` over {axis!r}: {leaf} is declared as one replica's rows, but it is the same on every \
replica, so gathering it would repeat it. Declare it as whole, or shard it over the axis, as \
`jc.shard` does."""

PARTS_SUMMED = """\
`lax.psum` over {axis!r}{at} of {like}: these are shards of a sum that is already reduced over \
that axis. Each replica holds a different shard, so a sum or mean would add unrelated elements. Do \
not reduce them again."""

LOCAL_NORM = """\
Gradients in shards over {axis!r} are scaled, or selected, by a number of this replica's shard \
alone{at}, such as its norm, which differs between replicas. Give `jc.sharded_optimizer` an \
elementwise optimizer and `max_norm` instead of `optax.clip_by_global_norm` and the like; or \
compute the number over all shards, with `jc.global_norm(gradients, {axis!r})` or \
`jc.all_finite(gradients, {axis!r})`."""

NARROW = """\
`{name}` over {axis!r}{at} of {like}, in a `shard_map` with a mesh axis that is left to the \
compiler: XLA's CPU compiler aborts the process on such 16-bit sums. Cast to float32 before it and \
back after it; `jc.all_reduce` does so by itself."""
