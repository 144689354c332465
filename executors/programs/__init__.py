"""Programs of users as tasks: how they are started and ended, and what their output says."""
