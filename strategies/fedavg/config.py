"""Settings of FedAvg."""

from pydantic import Field

from server_app.settings import Section


class Config(Section):
    """`fedavg.*`."""

    model: str = Field("cnn5", min_length=1)
