"""Training with TRL and PEFT: arguments, data in the trainer's shape, progress, checkpoints, what is saved."""
