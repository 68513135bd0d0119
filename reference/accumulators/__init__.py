"""How the matrix instructions of GPUs add: published models as data, and their simulation bit for bit."""
