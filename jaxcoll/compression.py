"""Wire formats of compressed reductions, and the state of error feedback.

`CommunicationOptions(compression="int8")` names a format by a string. The classes in this module
have parameters: `CommunicationOptions(compression=jc.compression.Int8(block=64))`.
"""

from jaxcoll._compression.formats import Bf16 as Bf16
from jaxcoll._compression.formats import Int4 as Int4
from jaxcoll._compression.formats import Int8 as Int8
from jaxcoll._train.residual import residual as residual
