"""What JAX keeps to itself, which no other room touches: probes, not version numbers."""

from jaxcoll._compat.axes import as_varying as as_varying
from jaxcoll._compat.axes import axes_in_scope as axes_in_scope
from jaxcoll._compat.axes import in_mesh_order as in_mesh_order
from jaxcoll._compat.axes import is_partially_sharded as is_partially_sharded
from jaxcoll._compat.axes import is_shadowed as is_shadowed
from jaxcoll._compat.axes import is_unreachable as is_unreachable
from jaxcoll._compat.axes import is_variance_mismatch as is_variance_mismatch
from jaxcoll._compat.axes import is_vmapped as is_vmapped
from jaxcoll._compat.axes import same_axes as same_axes
from jaxcoll._compat.axes import tracks_variance as tracks_variance
from jaxcoll._compat.axes import varying_axes as varying_axes
from jaxcoll._compat.axes import varying_axes_of_type as varying_axes_of_type
from jaxcoll._compat.axes import zeros_like_aval as zeros_like_aval
from jaxcoll._compat.primitives import AS_INVARIANT as AS_INVARIANT
from jaxcoll._compat.primitives import THROUGH as THROUGH
from jaxcoll._compat.primitives import apart as apart
from jaxcoll._compat.primitives import as_invariant as as_invariant
from jaxcoll._compat.primitives import as_stored as as_stored
from jaxcoll._compat.primitives import at_once as at_once
from jaxcoll._compat.primitives import needing as needing
from jaxcoll._compat.primitives import ordered as ordered
from jaxcoll._compat.primitives import through_backward as through_backward
from jaxcoll._compat.settings import configuration as configuration
from jaxcoll._compat.settings import configured as configured
from jaxcoll._compat.settings import has_backend as has_backend
from jaxcoll._compat.settings import users_line as users_line
