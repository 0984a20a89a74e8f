"""Scopes of programs that jaxcoll makes, for a mesh or for a cluster that is not here."""

from __future__ import annotations

import jax

from jaxcoll._dispatch.executable import remember
from jaxcoll._mesh.clusters import Topology
from jaxcoll._mesh.world import Worlds, named, worlds_of
from jaxcoll._spmd.scope import Scope


def mesh_scope(mesh: jax.sharding.Mesh) -> Scope:
    """Return a scope for programs compiled for `mesh`; axes that it lacks are local."""
    return Scope(world=worlds_of(mesh), record=remember)


def topology_scope(topology: Topology) -> Scope:
    """Return a scope for programs that are compiled for a cluster that is not here."""
    # Processes of one TPU slice, or of CPUs, count as one host: no network of another kind is
    # between them.
    hosts = tuple((k, k * (topology.platform == "gpu")) for k in range(topology.hosts))
    return Scope(world=Worlds(*named(topology.platform, topology.kind), hosts))
