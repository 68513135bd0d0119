"""An operation of a user, with its cases and a backend."""
