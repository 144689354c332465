"""Tokens of people and of workers: who may do what, until when, and how a token is cut at once.

`texts` makes and reads them, `rights` says what each may do, `store` keeps their digests in Redis, `broker_users` makes
Redis users of worker tokens, `workers` does the steps of both in order.
"""
