"""The operation moe-layer."""
