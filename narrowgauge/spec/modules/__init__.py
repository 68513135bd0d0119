"""What the training modules of reference and kernels share: recipes, autocast, and checks of arguments."""
