"""DTensors as arguments. Imported only where there is one."""
