"""Web page of a running server: lists its models and tries them with images and tensors.

A small ASGI application on a separate port, in a separate process, so that large images do not disturb the supervisor.
It sends requests to the server over HTTP like any client, and reads proofs and golden samples from the model stores. It
is stateless, and uses only the admin key in a request.
"""
