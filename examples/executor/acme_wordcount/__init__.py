"""An executor for gpuflow that counts words."""
