"""Ports mapped at a router: a small Internet Gateway Device over HTTP, spoken to by the real UPnP library; or none."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import trio
import trio.testing

from shoal.node.discovery import port_mapping
from shoal.node.discovery.port_mapping import LEASE_S, MappingFailed, PortMapping

DESCRIPTION = """<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">
<specVersion><major>1</major><minor>0</minor></specVersion><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>
<serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<SCPDURL>/scpd.xml</SCPDURL><controlURL>/control</controlURL><eventSubURL>/event</eventSubURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>"""
SOAP = (
    '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>%s</s:Body>'
    "</s:Envelope>"
)
FAULT = (
    "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
    '<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>718</errorCode>'
    "<errorDescription>ConflictInMappingEntry</errorDescription></UPnPError></detail></s:Fault>"
)


class Router(HTTPServer):
    """What it maps: external port to (internal port, lease); `taken` are others' already."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.mapped: dict[int, tuple[int, int]] = {}
        self.taken: set[int] = set()
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/description.xml"


class _Answer(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        self._send(200, DESCRIPTION)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        action = self.headers["SOAPAction"].strip('"').partition("#")[2]
        self.server.calls.append(action)
        answers = {
            "GetStatusInfo": "<NewConnectionStatus>Connected</NewConnectionStatus>",
            "GetExternalIPAddress": "<NewExternalIPAddress>203.0.113.7</NewExternalIPAddress>",
        }
        found = dict(re.findall(r"<(New\w+)>([^<]*)</New\w+>", body))
        if action == "AddPortMapping":
            external = int(found["NewExternalPort"])
            if external in self.server.taken:
                self._send(500, SOAP % FAULT)
                return
            assert found["NewProtocol"] == "TCP"
            lease = int(found.get("NewLeaseDuration") or 0)
            self.server.mapped[external] = (int(found["NewInternalPort"]), lease)
        elif action == "DeletePortMapping":
            del self.server.mapped[int(found["NewExternalPort"])]
        inner = answers.get(action, "")
        service = "urn:schemas-upnp-org:service:WANIPConnection:1"
        self._send(200, SOAP % f'<u:{action}Response xmlns:u="{service}">{inner}</u:{action}Response>')

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def router() -> Iterator[Router]:
    made = Router()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


async def test_ports_are_mapped_renewed_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with router() as device:
        device.taken = {4001}
        mapping = PortMapping((4001, 4002), description_url=device.url)
        await mapping.add()
        assert mapping.external == (4002, 4003), "4001 is another's; what is taken is gone round"
        assert device.mapped == {4002: (4001, LEASE_S), 4003: (4002, LEASE_S)}
        device.mapped.clear()
        await mapping.renew_when_due()
        assert device.mapped == {}, "it is not due"
        mapping._renew_at = trio.current_time()
        await mapping.renew_when_due()
        assert device.mapped == {4002: (4001, LEASE_S), 4003: (4002, LEASE_S)}
        with trio.CancelScope() as leaving:
            leaving.cancel()
            await mapping.remove()
        assert leaving.cancelled_caught
        assert device.mapped == {}


async def test_nothing_is_left_mapped_where_not_all_can_be() -> None:
    with router() as device:
        device.taken = set(range(4002, 4100))
        with pytest.raises(MappingFailed, match="none of the ports 4050 to"):
            await PortMapping((4001, 4050), description_url=device.url).add()
        assert device.mapped == {}


async def test_router_that_is_none_is_one_error() -> None:
    with pytest.raises(MappingFailed):
        await PortMapping((4001,), description_url="http://127.0.0.1:1/nothing.xml").add()


async def test_router_that_does_not_answer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "CALL_DEADLINE_S", 0.2)
    hanging = threading.Event()
    monkeypatch.setattr(PortMapping, "_find", lambda self: hanging.wait(30))
    try:
        with pytest.raises(MappingFailed, match="did not answer"):
            await PortMapping((4001,)).add()
    finally:
        hanging.set()
