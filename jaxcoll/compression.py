"""Wire formats of compressed reductions, and the state of error feedback.

`CommunicationOptions(compression="int8")` names a format by a string. The classes here take
arguments: `CommunicationOptions(compression=jc.compression.Int8(block=64))`.
"""

from jaxcoll._train.residual import residual as residual
from jaxcoll._wire.bf16 import Bf16 as Bf16
from jaxcoll._wire.int4 import Int4 as Int4
from jaxcoll._wire.int8 import Int8 as Int8
