"""First files of a repository that tests its own kernels: `narrowgauge init`."""
