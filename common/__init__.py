"""What all commands share: the command line, files, devices, clocks and sheets."""
