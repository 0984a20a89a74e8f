"""Primitives by what the proof knows of them: which sum, which move, which communicate."""

from jax.extend.core import Primitive, primitives

from jaxcoll import _compat
from jaxcoll._compat import marks

SUMS = {"psum", "psum_invariant"}
EQUALIZING = {*SUMS, "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
ABORTING = {*SUMS, "pmax", "pmin", "reduce_scatter"}
FIRST = {_compat.CAST_INVARIANT, "pvary", "pcast", "store", "unify_nans", "reshard", "depend_on"}
"""The result has the facts of the first operand, whatever the parameters are."""
SAME_PLACE = {"optimization_barrier", marks.THROUGH}
"""Result k has the facts of operand k."""
SILENT = {*FIRST, *SAME_PLACE, *marks.ALL, "axis_index"}
"""Equations that may name an axis but do not communicate."""
CALLS = {"shard_map", "composite", "core_call", "custom_vmap_call", "linear_call", "remat_opt"}
"""Calls of one program on the equation's operands, in addition to those of `subjaxprs`."""
FROM_ELSEWHERE = ("callback", "infeed", "rng_uniform", "recv")
"""Parts of names of primitives whose results depend on more than their operands."""
FUNCTIONS = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)}
FUNCTIONS |= {
    "split", "stack", "unstack", "tile", "broadcast_to", "empty", "scatter-sub", "mulhi",
    "ragged_dot_general", "scaled_matmul", "scaled_matmul_wrapper", "scaled_dot", "to_edtype",
    "from_edtype", "random_wrap", "random_unwrap", "random_clone", "iota_2x32_shape", "pin",
    "unpin", "layout_constraint", "platform_index", "with_memory_space_constraint",
    "dimension_size", "dim_as_value", "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper", "reduced_vary_cast_p", "reduced_vary_cast",
}  # fmt: skip
"""Functions of their operands: JAX's public list, and others that are frequent or cannot be lowered
by themselves on every platform."""
OF_REFS = {"get", "swap", "addupdate", "accum_grad_in_ref", "freeze"}
"""They read or change a mutable reference, their first operand."""
ON_REFS = {"get", "swap", "addupdate", "masked_load", "masked_swap", "program_id", "num_programs"}
"""Functions of a program's operands if it makes its mutable references itself, as a kernel does."""
PLAIN = {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "log", "tanh", "sqrt"}
PLAIN |= {"rsqrt", "integer_pow", "pow", "sign", "abs", "square", "logistic", "erf", "select_n"}
PLAIN |= {"dot_general", "transpose", "reshape", "broadcast_in_dim", "convert_element_type"}
PLAIN |= {"reduce_sum", "reduce_max", "squeeze", "slice", "concatenate", "pad"}
PLAIN |= {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "iota", "stop_gradient"}
"""The most frequent functions; their parameters contain neither axes nor programs."""
MIXING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce", "argmax", "argmin"}
MIXING |= {"cumsum", "cumprod", "cummax", "cummin", "dot_general", "sort", "top_k"}
"""They combine several elements, such as a row into its mean; a pack's rows are not a leaf's."""
MOVES = {"reshape", "squeeze", "transpose", "copy", "neg", "div", "slice"}
MOVES |= {"convert_element_type", "broadcast_in_dim", "concatenate", "select_n", *FIRST}
