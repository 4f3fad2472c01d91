"""What the gateway does with the calls it looks into, one module a concern.

A handler answers its call exactly once or raises: GatewayError and TranslateError become the
call's error. `plugin.gateway.procedures` says which handler has which call.
"""
