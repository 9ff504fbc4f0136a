"""Decode with exported heads, and measure what it costs and gives."""
