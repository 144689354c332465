"""The HTTP API. `app.create_app` makes it, `gpuflow gateway` serves it; nothing below the command line imports it."""
