"""The page for people: what a running server serves, tried with images and tensors in a browser.

A small ASGI application on a separate port, in a separate process: a large image must not disturb the supervisor.
It asks the server over HTTP like any client; of the model stores it reads the proofs and the golden samples of
versions that are loaded. It keeps no state, and knows no admin key but the one that comes with a request.
"""
