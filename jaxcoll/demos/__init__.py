"""Example trainings, through the public face."""
