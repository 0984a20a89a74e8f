"""How launchers write which processes a cluster has: TF_CONFIG, and lists of Slurm."""
