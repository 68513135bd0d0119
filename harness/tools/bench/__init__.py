"""Bench: times of kernels, each as a ratio to a ceiling measured in the same rounds of the same run."""
