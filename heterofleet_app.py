"""The entry Flower loads: `server` and `client`.

The name is unique on purpose, and so is what follows. In simulation Flower pickles the ClientApp by module name
and Ray workers look in the SuperLink's working directory first, so a second checkout (or any project with a
`client_app` package) would silently run the first one's code. Handlers made inside a function are pickled by
value; they carry this file's own folder with them and import from there, whatever else the process has loaded.
"""

from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


def _bind(client_app: ClientApp, server_app: ServerApp, app_dir: str) -> None:
    def own(module: str):
        import importlib
        import sys

        folders = ("client_app", "server_app", "strategies", "models", "tasks")
        loaded = getattr(sys.modules.get("client_app"), "__file__", None)
        if loaded is None or not loaded.startswith(app_dir + "/"):
            for name in [n for n in sys.modules if n.split(".")[0] in folders]:
                del sys.modules[name]
            sys.path[:] = [app_dir, *(p for p in sys.path if p != app_dir)]
            importlib.invalidate_caches()
        return importlib.import_module(module)

    def handler(action: str):
        def handle(message, context):
            node = own("client_app.app")
            return node.run(getattr(node, action), message, context)

        return handle

    client_app.query("describe")(handler("describe"))
    client_app.query("export")(handler("export"))
    client_app.train()(handler("train"))
    client_app.train("exchange")(handler("exchange"))
    client_app.evaluate()(handler("evaluate_own"))

    @server_app.main()
    def main(grid, context):
        own("server_app.app").main(grid, context)


_bind(client, server, str(Path(__file__).resolve().parent))
