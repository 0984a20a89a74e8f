"""All uses of private parts of JAX. They test for features, not for version numbers."""

from jaxcoll._compat.axes import as_varying as as_varying
from jaxcoll._compat.axes import automatic_axes as automatic_axes
from jaxcoll._compat.axes import axes_in_scope as axes_in_scope
from jaxcoll._compat.axes import in_mesh_order as in_mesh_order
from jaxcoll._compat.axes import is_partially_sharded as is_partially_sharded
from jaxcoll._compat.axes import is_vmapped as is_vmapped
from jaxcoll._compat.axes import must_keep_shape as must_keep_shape
from jaxcoll._compat.axes import obstacle as obstacle
from jaxcoll._compat.axes import same_axes as same_axes
from jaxcoll._compat.axes import tracks_variance as tracks_variance
from jaxcoll._compat.axes import types_tracked as types_tracked
from jaxcoll._compat.axes import varying_axes as varying_axes
from jaxcoll._compat.axes import varying_axes_of_type as varying_axes_of_type
from jaxcoll._compat.axes import zeros_like_aval as zeros_like_aval
from jaxcoll._compat.primitives import AS_INVARIANT as AS_INVARIANT
from jaxcoll._compat.primitives import all_depending_on as all_depending_on
from jaxcoll._compat.primitives import as_arrays as as_arrays
from jaxcoll._compat.primitives import as_invariant as as_invariant
from jaxcoll._compat.primitives import as_stored as as_stored
from jaxcoll._compat.primitives import depending_on as depending_on
from jaxcoll._compat.primitives import ordered as ordered
from jaxcoll._compat.primitives import terms_of_sum as terms_of_sum
from jaxcoll._compat.primitives import traced_once as traced_once
from jaxcoll._compat.primitives import unfused as unfused
