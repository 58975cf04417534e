"""Settings of local training: none beyond `train.*`."""

from server_app.settings import Section


class Config(Section):
    """`local.*`."""
