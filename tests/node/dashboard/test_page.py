"""The page in real headless Chromium, before a made-up swarm: every state that a viewer can meet."""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path

import pytest

from shoal.lab.served_page import CHROMIUM, DRIVER, Page, Served, browsing
from shoal.lab.synthetic_swarm import ROUND_TOKENS, SyntheticSwarm
from shoal.node.control_client import BanStatus
from shoal.node.dashboard.peers import LIVE_LIMIT
from shoal.node.dashboard.token import load_token
from shoal.node.reporting.events import Failed, Sampled
from shoal.protocol.names import called
from tests.node.dashboard.test_settings import read_code

FOREIGN = """
return performance.getEntriesByType('resource').map(e => e.name).filter(name => !name.startsWith(location.origin))
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("selenium") is None or not (Path(CHROMIUM).exists() and Path(DRIVER).exists()),
    reason="a browser needs selenium, and chromium with chromedriver at /usr/bin",
)


def swarm_of(peers: int, rounds: int = 12, *, rollouts: bool = False) -> SyntheticSwarm:
    return SyntheticSwarm(peers=peers, now=time.time(), rounds=rounds, rollouts=rollouts)


def opened(page: Page, served: Served) -> None:
    page.driver.get(served.url)
    page.until("document.body.dataset.seq")


def assert_clean(page: Page) -> None:
    assert page.complaints() == []
    assert page.run(FOREIGN) == []


def test_a_viewer_sees_the_swarm_a_death_and_the_end_of_the_node(tmp_path: Path) -> None:
    with Served(swarm_of(6), tmp_path) as served, browsing() as page:
        opened(page, served)
        assert page.count("#map .peer") == 7
        assert page.count("#map .peer.self") == 1
        assert page.count("#map .peer.gone") == 0
        assert int(page.text("#t-round")) >= 12
        assert page.count("#certificates tbody tr") >= 12
        assert page.count("#rounds li") >= 12
        assert page.count("#health .ok") == 5
        gave = re.search(r"It gave([\d.]+)([KM]) tokens in (\d+) rounds since \d", page.text("#facts"))
        assert gave is not None
        assert page.run("return [...document.querySelectorAll('#facts dd')].every(e => e.scrollWidth <= e.clientWidth)")
        unit = {"K": 1e3, "M": 1e6}[gave[2]]
        assert int(gave[3]) >= 12
        assert abs(float(gave[1]) * unit - int(gave[3]) * ROUND_TOKENS) <= 0.05 * unit
        assert page.run("return document.querySelector('#loss canvas').width") > 100
        labels = page.run("return [...document.querySelectorAll('#map .peer:not(.self) text')].map(t => t.textContent)")
        others = {peer.peer for peer in served.swarm.look().peers if peer.reach != "self"}
        assert set(labels) == {called(peer, served.swarm.names) for peer in others}
        assert "–" not in page.text("#loss .u-legend"), "nobody points at the curve, so it says the newest values"
        assert page.count("[data-phase]:not([hidden])") == 4
        killed: list[str] = []
        served.do(lambda: killed.extend(served.swarm.kill()))
        page.until("document.querySelectorAll('#map .peer.gone').length === 1")
        page.until("document.querySelector('#happenings .bad')")
        assert called(killed[0], served.swarm.names) in page.text("#happenings .bad")
        assert page.text("#t-nodes-more") == "7 members · 1 gone"
        assert_clean(page)
        served.stop()
        page.until("!document.getElementById('banner').hidden")
        assert "No word from the node since" in page.text("#banner")
        assert page.run("return document.querySelector('main').classList.contains('stale')")
        assert page.run("return document.getElementById('leave').disabled")


@pytest.mark.long
def test_a_page_without_rounds_and_without_company_says_what_to_do(tmp_path: Path) -> None:
    with Served(swarm_of(0, rounds=0), tmp_path) as served, browsing() as page:
        opened(page, served)
        assert page.text("#phase-text") == "joining"
        for part in ("#loss-empty", "#rounds-empty", "#certificates-empty", "#map-alone"):
            assert page.run(f"return document.querySelector('{part}').offsetHeight") > 0, part
        assert "shoal link" in page.text("#health .warn .remedy")
        assert_clean(page)


@pytest.mark.long
def test_a_page_that_lost_its_node_takes_it_up_again(tmp_path: Path) -> None:
    with browsing() as page:
        with Served(swarm_of(3), tmp_path) as served:
            opened(page, served)
            port = int(served.url.rstrip("/").rpartition(":")[2])
        page.until("document.querySelector('main').classList.contains('stale')")
        with Served(swarm_of(4), tmp_path, port=port):
            page.until("!document.querySelector('main').classList.contains('stale')")
            page.until("document.querySelectorAll('#map .peer').length === 5")
            assert page.run("return document.getElementById('banner').hidden")


@pytest.mark.long
def test_a_thousand_peers_come_as_numbers_and_each_can_be_found(tmp_path: Path) -> None:
    with Served(swarm_of(1000), tmp_path) as served, browsing() as page:
        opened(page, served)
        assert page.count("#map .peer") == LIVE_LIMIT
        assert page.text("#map-sum") == "1,001 nodes known, 1,001 alive, 200 of them drawn"
        assert page.text("#peer-groups [data-group='']") == "all 1,001"
        page.run("document.getElementById('peers-card').scrollIntoView()")
        page.until("document.querySelectorAll('#peers tbody tr').length === 30")
        page.click("#peers-next")
        page.until("document.getElementById('peers-place').textContent === '31 to 60 of 1,001'")
        killed: list[str] = []
        served.do(lambda: killed.extend(served.swarm.kill(40)))
        page.until("document.querySelector('#peer-groups [data-group=gone]').textContent === 'gone 40'")
        page.click("#peer-groups [data-group=gone]")
        page.until("document.getElementById('peers-place').textContent === '1 to 30 of 40'")
        assert page.run("return document.querySelectorAll('#peers tbody tr.gone').length") == 30
        page.driver.find_element("id", "find").send_keys(killed[-1][-6:])
        page.until("document.querySelectorAll('#peers tbody tr').length === 1")
        page.click("#peers tbody button")
        page.until("document.querySelectorAll('#peer-happenings li').length > 0")
        assert page.text("#peer-name") == killed[-1]
        assert page.text("#peer-more").startswith("Stategone")
        page.click("#peer button")
        page.click("#peer-groups [data-group='']")
        page.driver.find_element("id", "find").clear()
        page.driver.find_element("id", "find").send_keys("0.0.9")
        page.until("document.getElementById('peers-place').textContent.endsWith('of 25')")
        assert_clean(page)


@pytest.mark.long
def test_two_hundred_peers_can_be_seen_and_walked_through(tmp_path: Path) -> None:
    with Served(swarm_of(199), tmp_path) as served, browsing() as page:
        opened(page, served)
        assert page.count("#map .peer") == 200
        spots = page.run(
            "return [...document.querySelectorAll('#map .peer:not(.self)')].map(g => g.style.transform"
            ".match(/-?[\\d.]+/g).map(Number))"
        )
        spots = [spot for spot in spots if len(spot) == 2]
        nearest = min(
            (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 for i, a in enumerate(spots) for b in spots[:i]
        )  # no peer hides another
        assert nearest**0.5 > 6
        page.driver.find_element("id", "map").send_keys("\ue014")  # the right arrow
        page.until("!document.getElementById('map-more').hidden")
        assert page.count("#map .picked") == 1
        picked = page.run("return document.querySelector('#map .picked').dataset.peer")
        page.driver.find_element("id", "map").send_keys("\ue007")  # Enter
        page.until("document.querySelectorAll('#peer-more dt').length > 3")
        assert page.text("#peer-name") == picked
        assert_clean(page)


@pytest.mark.long
def test_what_the_model_says_is_read_beside_what_it_said_first(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>\x1b[2J\u202ea\nb\u2028"
    with Served(swarm_of(4, rounds=3), tmp_path) as served, browsing() as page:
        opened(page, served)
        page.until("document.querySelectorAll('#samples-card figure').length === 4")
        assert page.text("#samples-card figcaption") == "after round 1"
        assert page.text("#samples-card pre b") == "def "
        served.do(lambda: served.swarm.waiting.append(Sampled(round=90, texts={"<b>": hostile, "x": ""})))
        page.until("document.querySelector('#samples-card').textContent.includes('after round 90')")
        newest = page.run("return document.querySelectorAll('#samples-card figure pre')[1].textContent")
        assert newest == "<b><img src=x onerror=alert(1)>\ufffd[2J\ufffda\nb\ufffd"
        assert page.count("#samples-card img, #samples-card b b") == 0
        assert_clean(page)


@pytest.mark.long
def test_the_line_that_joins_can_be_copied_and_read_by_a_camera(tmp_path: Path) -> None:
    with Served(swarm_of(0), tmp_path) as served, browsing(390, 844) as page:
        opened(page, served)
        page.click("#map-alone a")
        page.until("document.querySelector('#joining .qr path')")
        line = page.text("#join-line")
        assert line.startswith("shoal run 'shoal:")
        assert page.run("return document.documentElement.scrollWidth") <= 390
        assert page.text("#settings .changed") == "cuda"
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            page.run("document.querySelector('.qr').scrollIntoView({block: 'center'})")
            page.shoot(tmp_path / f"{scheme}.png")
            assert read_code(tmp_path / f"{scheme}.png") == line
        assert_clean(page)


@pytest.mark.long
def test_a_line_with_a_secret_is_shown_to_who_asks_and_has_the_token(tmp_path: Path) -> None:
    swarm = swarm_of(2)
    swarm.invites = True
    with Served(swarm, tmp_path) as served, browsing() as page:
        opened(page, served)
        page.click("#setup summary")
        page.until("document.getElementById('show-secret')")
        page.until("document.querySelectorAll('#settings dt').length === 3")
        assert "shoal:A" not in page.run("return document.documentElement.outerHTML")
        page.click("#show-secret")
        page.until("document.getElementById('key').open")
        page.driver.find_element("id", "token").send_keys(load_token(tmp_path))
        page.click("#key .primary")
        page.until("document.getElementById('join-line')")
        assert page.text("#join-line").startswith("shoal run 'shoal:A")
        assert "Whoever has this line may join" in page.text("#joining")


@pytest.mark.long
def test_texts_of_others_stay_text(tmp_path: Path) -> None:
    with Served(swarm_of(4, rollouts=True), tmp_path) as served, browsing() as page:
        served.do(lambda: served.swarm.waiting.append(Failed(at=time.time(), message="<b id=b>x")))
        opened(page, served)
        page.until("document.querySelectorAll('#reading pre').length === 5")
        assert "<script>" in page.text("#reading")
        assert page.text("#reading pre b").strip() == "lower"
        assert "<answer>85</answer>\nlower\n<answer>79</answer>" in page.text("#reading")
        assert page.count("[data-phase]:not([hidden])") == 0, "no round here has these phases"
        assert "others’ 0.40 in 1 group" in page.text("#rollout-facts")
        assert "Refusedno variance 1" in page.text("#rollout-facts")
        assert called(served.swarm.look().peers[1].peer, served.swarm.names) in page.text("#rollout-facts")
        group = re.search(
            r"round (\d+), policy (\d+) · 4 answers · (in this round|\d+ rounds? ago)", page.text("#groups")
        )
        assert group is not None
        assert int(group[1]) == int(group[2]) + 1
        assert page.count("#reading img, #reading script, b#b") == 0
        page.until("document.querySelector('#happenings .bad')")
        assert "<b id=b>x" in page.text("#happenings")
        assert "owned" not in page.driver.title
        assert page.count("#groups button") > 4
        page.click("#groups li:nth-child(3) button")
        page.until("document.querySelectorAll('#groups [aria-pressed=true]').length === 1")
        assert_clean(page)


@pytest.mark.long
def test_pause_and_leave_are_asked_about_first(tmp_path: Path) -> None:
    with Served(swarm_of(3), tmp_path) as served, browsing() as page:
        opened(page, served)
        page.until("!document.getElementById('pause').disabled")
        page.click("#pause")
        page.click("#ask button[value=no]")
        assert served.swarm.orders == []
        page.click("#pause")
        page.click("#ask-yes")
        page.until("document.getElementById('key').open")
        assert "shoal status" in page.text("#key")
        page.click("#key-cancel")
        assert served.swarm.orders == []
        page.click("#pause")
        page.click("#ask-yes")
        for given in ("not the token", load_token(tmp_path)):
            page.until("document.getElementById('key').open")
            page.driver.find_element("id", "token").send_keys(given, "\ue007")  # Enter
        page.until("document.getElementById('pause').textContent === 'Resume'")
        assert page.text("#banner").startswith("Paused; it votes and keeps the state")
        page.driver.refresh()
        page.until("document.getElementById('pause').textContent === 'Resume'")
        page.click("#pause")
        page.until("document.getElementById('pause').textContent === 'Pause'")
        assert page.run("return document.getElementById('banner').hidden")
        page.click("#leave")
        assert "says goodbye" in page.text("#ask-text")
        page.click("#ask-yes")
        page.until("document.getElementById('phase-text').textContent === 'leaving'")
        assert served.swarm.orders == ["pause", "resume", "leave"]
        served.stop()
        page.until("!document.getElementById('banner').hidden")
        assert page.text("#banner").startswith("This node has left the swarm")


@pytest.mark.long
def test_the_link_of_the_nodes_user_orders_at_once_and_leaves_no_token_in_the_address(tmp_path: Path) -> None:
    with Served(swarm_of(3), tmp_path) as served, browsing() as page:
        page.driver.get(served.link)
        page.until("document.body.dataset.seq")
        assert page.driver.current_url == served.url
        page.click("#pause")
        page.click("#ask-yes")
        page.until("document.getElementById('pause').textContent === 'Resume'")
        assert served.swarm.orders == ["pause"]
        assert_clean(page)


@pytest.mark.long
def test_the_page_says_what_to_do_where_rounds_wait_and_who_is_banned(tmp_path: Path) -> None:
    swarm = swarm_of(4)
    with Served(swarm, tmp_path) as served, browsing() as page:
        opened(page, served)
        others = [peer.peer for peer in swarm.look().peers if peer.reach != "self"]
        left: list[str] = []
        served.do(lambda: left.append(swarm.part()))
        page.until("[...document.querySelectorAll('#happenings li')].some(e => e.textContent.endsWith('has left'))")
        assert page.count("#happenings .bad") == 0
        page.run("document.getElementById('peers-card').scrollIntoView()")
        page.until("document.querySelectorAll('#peers .badge.left').length === 1")

        def stall() -> None:
            swarm.kill(2)
            swarm.phase = "no quorum"

        served.do(stall)
        page.until("document.getElementById('banner').textContent.startsWith('Rounds wait for a majority')")
        assert "forget" not in page.text("#banner"), "it was heard of just now"
        served.do(lambda: setattr(swarm, "silent_for_long", True))
        page.until("document.getElementById('banner').textContent.includes('shoal rebase --forget')")
        me = swarm.look().status.peer_id
        proof = "ab" * 32
        for peer, until in ((others[0], 44), (me, None)):
            ban = BanStatus(peer_id=peer, term="0.0", round=14, until=until, evidence=proof)
            served.do(lambda ban=ban: setattr(swarm, "bans", (*swarm.bans, ban)))  # type: ignore[misc]
        page.until("document.querySelectorAll('#bans tbody tr').length === 2")
        told = page.text("#bans tbody")
        assert called(others[0], served.swarm.names) in told
        assert "round 44" in told
        assert "for ever" in told
        assert page.text("#banner").startswith("The swarm banned this node for ever")
        assert_clean(page)


@pytest.mark.long
@pytest.mark.parametrize("width", [320, 390, 768, 1360])
def test_the_page_fits_its_screen_in_light_and_dark(tmp_path: Path, width: int) -> None:
    with Served(swarm_of(12, rollouts=width == 390), tmp_path) as served, browsing(width, 844) as page:
        opened(page, served)
        assert page.run("return document.documentElement.scrollWidth") <= width
        colours = []
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            colours.append(page.run("return getComputedStyle(document.body).backgroundColor"))
            for selector in ("body", ".muted", ".danger", "#rounds .note"):
                assert page.run(CONTRAST % selector) >= 4.5, (scheme, selector)
        assert colours[0] != colours[1]
        page.click("#theme")
        assert page.run("return getComputedStyle(document.body).backgroundColor") == colours[0]
        page.driver.refresh()
        page.until("document.body.dataset.seq")
        assert page.run("return getComputedStyle(document.body).backgroundColor") == colours[0]
        unnamed = page.run(
            "return [...document.querySelectorAll('button, input, svg[tabindex], section')].filter(e =>"
            " e.checkVisibility() && !(e.textContent.trim() || e.getAttribute('aria-label') ||"
            " e.labels?.length)).length"
        )
        assert unnamed == 0
        assert_clean(page)


CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const element = document.querySelector('%s');
let behind = element;
while (/rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
"""
