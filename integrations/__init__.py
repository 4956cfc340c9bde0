"""Trainers that use the engine: installed as ``rollout.integrations``.

The engine knows none of them. Each file here is for one trainer, imports that trainer at its top,
and is imported by the user, so that the engine needs no trainer to be installed.
"""
