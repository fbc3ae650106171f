"""What this process runs on: its device, the compiler, and other processes."""
