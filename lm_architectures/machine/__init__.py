"""Devices, the compiler, and processes."""
