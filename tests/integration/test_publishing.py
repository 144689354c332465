"""What a publish takes: the client of a channel and what is declared are made once, and again when they are gone."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Exchange

from gpuflow.broker.connection import LeasedProducer
from tests.support.fleet import TestFleet


def test_a_publish_declares_and_connects_once(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    app = fleet.app
    app.send_task("team.first", queue="team", ignore_result=True)
    bound: list[str] = []
    bind = Exchange.bind

    def counted(self: Any, channel: Any) -> Any:
        bound.append(self.name)
        return bind(self, channel)

    monkeypatch.setattr(Exchange, "bind", counted)
    with app.amqp.producer_pool.acquire() as producer:
        assert isinstance(producer, LeasedProducer)
        channel = producer.channel
        with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
            assert first is second
    for _ in range(3):
        app.send_task("team.more", queue="team", ignore_result=True)
    seen = [name for name in bound if name]
    app.amqp.producer_pool.connections.connection.declared_entities.clear()
    with app.amqp.producer_pool.acquire() as producer:
        producer.connection.declared_entities.clear()
    app.send_task("team.more", queue="team", ignore_result=True)

    assert seen == [], "what was declared is declared again"
    assert [name for name in bound if name], "nothing would be declared on a new connection"
    assert fleet.broker.client.llen(app.keys.prefix + "team") == 5


def test_a_lost_connection_declares_and_connects_anew(fleet: TestFleet) -> None:
    app = fleet.app
    app.send_task("team.first", queue="team", ignore_result=True)
    with app.amqp.producer_pool.acquire() as producer:
        channel = producer.channel
        with channel.conn_or_acquire() as before:
            pass
        channel._disconnect_pools()
        with channel.conn_or_acquire() as after:
            assert after is not before
            assert after.ping()
    app.amqp.producer_pool.connections.connection.declared_entities.clear()
    fleet.broker.client.flushall()
    app.send_task("team.again", queue="team", ignore_result=True)

    assert fleet.broker.client.llen(app.keys.prefix + "team") == 1


def test_a_closed_channel_is_no_end(fleet: TestFleet) -> None:
    app = fleet.app
    with app.connection_for_write() as connection:
        connection.default_channel.close()
        app.send_task("team.first", queue="team", connection=connection, ignore_result=True)

    assert fleet.broker.client.llen(app.keys.prefix + "team") == 1
