"""All uses of private parts of JAX. They test for features, not for version numbers."""

from jaxcoll._compat.axes import automatic_axes as automatic_axes
from jaxcoll._compat.axes import axes_in_scope as axes_in_scope
from jaxcoll._compat.axes import cast_varying as cast_varying
from jaxcoll._compat.axes import is_partially_sharded as is_partially_sharded
from jaxcoll._compat.axes import is_vmapped as is_vmapped
from jaxcoll._compat.axes import must_keep_shape as must_keep_shape
from jaxcoll._compat.axes import obstacle as obstacle
from jaxcoll._compat.axes import order_by_mesh as order_by_mesh
from jaxcoll._compat.axes import same_axes as same_axes
from jaxcoll._compat.axes import tracks_variance as tracks_variance
from jaxcoll._compat.axes import types_tracked as types_tracked
from jaxcoll._compat.axes import varying_axes as varying_axes
from jaxcoll._compat.axes import varying_axes_of_type as varying_axes_of_type
from jaxcoll._compat.axes import zeros_like_aval as zeros_like_aval
from jaxcoll._compat.primitives import CAST_INVARIANT as CAST_INVARIANT
from jaxcoll._compat.primitives import cast_invariant as cast_invariant
from jaxcoll._compat.primitives import depend_on as depend_on
from jaxcoll._compat.primitives import depend_on_all as depend_on_all
from jaxcoll._compat.primitives import forbid_fusion as forbid_fusion
from jaxcoll._compat.primitives import make_arrays as make_arrays
from jaxcoll._compat.primitives import order_after as order_after
from jaxcoll._compat.primitives import store as store
from jaxcoll._compat.primitives import terms_of_sum as terms_of_sum
from jaxcoll._compat.primitives import trace_once as trace_once
from jaxcoll._compat.primitives import unify_nans as unify_nans
