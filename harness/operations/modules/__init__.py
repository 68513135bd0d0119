"""Modules: layers forward and backward under a training recipe, judged stage by stage."""
