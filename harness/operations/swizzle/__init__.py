"""The operation swizzle."""
