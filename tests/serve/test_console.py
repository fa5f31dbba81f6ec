"""The console in a real browser, against a real server."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from recmill.artifacts.bundle.bundle import Bundle
from recmill.cli import main
from recmill.stages.serve import console

FOLDER = Path(console.__file__).parent
FILES = sorted(file for file in FOLDER.iterdir() if file.suffix in (".html", ".css", ".js", ".svg"))
MAX_BYTES = 80 << 10
READER, ADMIN = "reader-0123456789", "admin-0123456789"

expect = pytest.importorskip("playwright.sync_api").expect


# the files


@pytest.fixture(scope="module")
def files(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http) as client:
        yield client


def test_every_file_has_its_type_and_the_policy(files: httpx.Client) -> None:
    for file in FILES:
        answer = files.get("/" if file.name == "index.html" else f"/console/{file.name}")
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].split(";")[0] in (
            "text/html",
            "text/css",
            "text/javascript",
            "image/svg+xml",
        )
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_a_browser_that_has_a_file_does_not_get_it_again(files: httpx.Client) -> None:
    tag = files.get("/console/app.js").headers["etag"]
    again = files.get("/console/app.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert files.get("/console/app.js", headers={"if-none-match": '"other"'}).status_code == 200


def test_nothing_else_of_the_folder_is_served(files: httpx.Client) -> None:
    for path in (
        "/console/__init__.py",
        "/console/../telemetry.py",
        "/console/",
        "/console/..%2ftelemetry.py",
    ):
        assert files.get(path).status_code == 404


def test_the_page_is_small_and_asks_nobody_else() -> None:
    assert sum(file.stat().st_size for file in FILES) < MAX_BYTES
    text = "".join(file.read_text(encoding="utf-8") for file in FILES if file.suffix != ".svg")
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG, which is not fetched"
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=", text) == []


# in a browser


@pytest.fixture(scope="module")
def two_versions(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A bundle folder with a version in float32, then one in int8; and their names."""
    into = tmp_path_factory.mktemp("console") / "bundle"
    shutil.copytree(bundles, into)
    old = Bundle.open(into).version
    arguments = ["export", "--checkpoint", bundles.parent / "checkpoint", "--into", into, "--rows", "int8"]
    assert main([*map(str, arguments), "--quiet"]) == 0
    return into, old, Bundle.open(into).version


@pytest.fixture(scope="module")
def address(two_versions: tuple[Path, str, str], start: Callable[..., Any], tmp_path_factory: Any) -> str:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"{READER} read\n{ADMIN} admin\n", encoding="utf-8")
    tokens.chmod(0o600)
    return str(start(bundle=two_versions[0], token_file=tokens).http)


@pytest.fixture(scope="module")
def user(address: str) -> str:
    answer = httpx.get(f"{address}/v1/users?limit=1", headers={"Authorization": f"Bearer {READER}"})
    return str(answer.json()["users"][0])


Open = Callable[..., Any]


@pytest.fixture
def open_page(open_in_browser: Open, address: str) -> Open:
    """Opens the console at an address behind #."""

    def open_page(view: str = "", token: str = READER, **context: Any) -> Any:
        return open_in_browser(f"{address}/#{view}", token, **context)

    return open_page


def rows_of(page: Any) -> Any:
    return page.locator("#recommend-table tbody tr")


@pytest.mark.services
def test_a_user_is_searched_and_asked_for_by_keyboard_alone(open_page: Open, user: str) -> None:
    page = open_page()
    expect(page.locator("#serving")).to_contain_text("quickstart")
    page.keyboard.press("/")
    page.keyboard.type(user[:-1])
    expect(page.get_by_role("option").first).to_be_visible()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(rows_of(page)).to_have_count(20)
    assert page.locator("#user").input_value().startswith(user[:-1])
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(rows_of(page).nth(1)).to_have_attribute("aria-selected", "true")
    item = rows_of(page).nth(1).locator("td.title").inner_text()
    expect(page.get_by_role("heading", name="Why")).to_contain_text(item)
    expect(page).to_have_url(re.compile("&row=2$"))


@pytest.mark.services
def test_the_items_shown_are_those_that_the_server_answers(open_page: Open, user: str, address: str) -> None:
    page = open_page(f"recommend?user={user}&k=7")
    expect(rows_of(page)).to_have_count(7)
    headers = {"Authorization": f"Bearer {READER}"}
    answer = httpx.post(f"{address}/v1/recommend", json={"user": user, "k": 7}, headers=headers).json()
    shown = page.locator("#recommend-table tbody td.mono").all_inner_texts()
    assert shown == [str(item["id"]) for item in answer["items"]]
    for stage in ("user", "recall", "rank"):
        expect(page.locator("#recommend-summary .legend")).to_contain_text(stage)


@pytest.mark.services
def test_context_is_sent_as_the_recipe_types_it_and_stands_in_the_address(open_page: Open, user: str) -> None:
    page = open_page(f"recommend?user={user}")
    expect(rows_of(page)).to_have_count(20)
    page.locator("summary").first.click()
    expect(page.locator("#context-names option")).to_have_count(4)
    names = page.locator("#context-names option").evaluate_all("all => all.map((one) => one.value)")
    assert names == ["device", "position", "price_shown", "time"]
    page.get_by_label("Context column").fill("position")
    page.get_by_label("Value").fill("3")
    with page.expect_request("**/v1/recommend") as asked:
        page.get_by_label("Value").press("Enter")
    assert asked.value.post_data_json["context"] == {"position": 3}
    expect(page.locator("#why")).to_contain_text("Context you gave")
    expect(page).to_have_url(re.compile(r"c\.position=3"))


@pytest.mark.services
def test_an_item_as_if_just_clicked_is_sent_as_recent(open_page: Open, user: str) -> None:
    page = open_page(f"recommend?user={user}&row=1")
    expect(rows_of(page)).to_have_count(20)
    item = rows_of(page).first.locator("td.mono").inner_text()
    with page.expect_request("**/v1/recommend") as asked:
        page.get_by_role("button", name="as if just clicked").click()
    assert asked.value.post_data_json["recent"] == [item]


@pytest.mark.services
def test_the_console_opens_with_users_and_items_to_look_at(open_page: Open, address: str) -> None:
    page = open_page()
    status = httpx.get(f"{address}/v1/status", headers={"Authorization": f"Bearer {READER}"}).json()
    busiest = status["manifest"]["busiest_users"]
    expect(page.locator(".people button")).to_have_count(len(busiest))
    expect(page.locator(".top li")).to_have_count(10)
    expect(page.locator("#recommend-summary .facts")).to_contain_text("ready")
    page.locator(".people button").first.click()
    expect(rows_of(page)).to_have_count(20)
    assert page.locator("#user").input_value() == str(busiest[0]["id"])
    expect(page.locator(".history .chips li")).to_have_count(min(20, busiest[0]["items"]))


@pytest.mark.services
def test_an_answer_that_comes_before_the_names_of_columns_has_titles_in_the_end(
    open_page: Open, user: str
) -> None:
    page, held = open_page(), []
    expect(page.locator("#serving")).to_contain_text("quickstart")

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/v1/status", hold)
    page.goto(f"{page.url.split('#')[0]}#recommend?user={user}")
    page.reload()
    expect(rows_of(page).first).to_be_visible()
    expect(rows_of(page).first.locator("td.title")).to_have_count(0)
    held[-1].continue_()
    expect(rows_of(page).first.locator("td.title")).to_be_visible()
    expect(rows_of(page).first).to_have_attribute("aria-selected", "true")
    history = page.get_by_role("list", name="The user's latest items").get_by_role("link")
    assert "undefined" not in history.all_inner_texts()


@pytest.mark.services
def test_why_names_items_that_lead_to_their_pages(open_page: Open, address: str) -> None:
    status = httpx.get(f"{address}/v1/status", headers={"Authorization": f"Bearer {READER}"}).json()
    page = open_page(f"recommend?user={status['manifest']['busiest_users'][0]['id']}&row=1")
    expect(page.locator("#why .reason")).not_to_be_empty()
    led = page.locator("#why .chips a").first
    title = led.inner_text()
    assert title in page.locator("#why .reason").inner_text()
    led.click()
    expect(page.get_by_role("heading", level=2, name=title)).to_be_visible()
    expect(page.get_by_role("grid", name="Similar items").locator("tbody tr").first).to_be_visible()
    page.get_by_role("grid", name="Similar items").locator("tbody tr").first.click()
    expect(page.get_by_role("heading", level=2, name=title, exact=True)).to_have_count(0)


@pytest.mark.services
def test_a_filter_is_sent_and_stands_in_the_address(open_page: Open, user: str) -> None:
    page = open_page(f"recommend?user={user}&where=price+%3C+30")
    expect(rows_of(page).first).to_be_visible()
    prices = page.locator("#recommend-table tbody tr td:last-child").all_inner_texts()
    assert prices
    assert all(float(price) < 30 for price in prices)
    page.locator("#where").fill("pricey < 30")
    page.locator("#where").press("Enter")
    expect(page.locator("#recommend-table")).to_contain_text("pricey")
    expect(page).to_have_url(re.compile("where=pricey"))


@pytest.mark.services
def test_a_boost_is_added_by_hand_lifts_its_items_and_stands_in_the_address(
    open_page: Open, user: str
) -> None:
    page = open_page(f"recommend?user={user}")
    expect(rows_of(page).first).to_be_visible()
    prices = page.locator("#recommend-table tbody tr td:last-child")
    before = [float(price) for price in prices.all_inner_texts()]
    page.locator("#more summary").click()
    page.get_by_role("button", name="Add a boost").click()
    page.get_by_label("Boost items where").fill("price > 40")
    page.get_by_label("Factor").fill("50")
    expect(page.locator("#more-count")).to_have_text("(1)")
    page.get_by_label("Factor").press("Enter")
    expect(rows_of(page).first).to_contain_text("×50")
    after = [float(price) for price in prices.all_inner_texts()]
    assert sum(price > 40 for price in after) > sum(price > 40 for price in before)
    expect(page).to_have_url(re.compile(r"b\.50=price"))
    expect(page.locator("#why")).to_contain_text("times boost")
    page.reload()
    expect(rows_of(page).first).to_contain_text("×50")
    page.get_by_role("button", name="Remove this boost").click()
    page.locator("#where").press("Enter")
    expect(rows_of(page).first).not_to_contain_text("×")


@pytest.mark.services
def test_on_a_phone_items_are_cards_with_their_titles(open_page: Open, user: str) -> None:
    page = open_page(f"recommend?user={user}", viewport={"width": 360, "height": 740})
    title, score = rows_of(page).first.locator("td.title"), rows_of(page).first.locator("td.number").nth(1)
    expect(title).to_be_visible()
    box, right = title.bounding_box(), score.bounding_box()
    assert box["x"] >= 0
    assert right["x"] + right["width"] <= 360
    assert abs(box["y"] - right["y"]) < box["height"]


@pytest.mark.services
def test_an_unknown_user_is_said_to_be_unknown_and_text_stays_text(open_page: Open) -> None:
    page = open_page("recommend?user=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    expect(page.locator("#recommend-notes")).to_contain_text(
        "“<img src=x onerror=alert(1)>” is not known here"
    )
    expect(rows_of(page)).to_have_count(20)
    assert page.locator("main img").count() == 0


@pytest.mark.services
def test_two_versions_stand_side_by_side(
    open_page: Open, user: str, two_versions: tuple[Path, str, str]
) -> None:
    _, old, new = two_versions
    page = open_page(f"recommend?user={user}&k=10")
    expect(rows_of(page)).to_have_count(10)
    page.keyboard.press("c")
    expect(page.locator("#compare-tables tbody tr")).to_have_count(20)
    expect(page.locator("#compare-tables h2 .mono")).to_have_text([new, old])
    expect(page.locator("#compare-notes dd").first).to_contain_text("of 10 and 10")
    page.get_by_role("button", name="Swap").click()
    expect(page.locator("#compare-tables h2 .mono")).to_have_text([old, new])
    expect(page).to_have_url(re.compile(f"a={old}&b={new}"))


@pytest.mark.services
def test_the_charts_move_and_can_be_paused_and_read(open_page: Open, address: str) -> None:
    page = open_page("live")
    headers = {"Authorization": f"Bearer {READER}"}
    for _ in range(20):
        httpx.post(f"{address}/v1/recommend", json={"k": 5}, headers=headers)
    expect(page.locator("#live-facts dd").first).not_to_contain_text(re.compile("^0requests"))
    expect(page.locator("figure")).to_have_count(3)
    expect(page.locator("#live-stages")).to_contain_text("rank")
    page.keyboard.press("p")
    expect(page.locator("#pause")).to_have_text("Go on")
    page.wait_for_timeout(300)
    before = page.locator("#charts").inner_html()
    page.wait_for_timeout(1500)
    assert page.locator("#charts").inner_html() == before
    page.locator("figure svg[role=img]").first.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("figcaption").first).to_contain_text("1 s before")


@pytest.mark.services
def test_the_bundle_card_says_what_serves(open_page: Open, two_versions: tuple[Path, str, str]) -> None:
    _, old, new = two_versions
    page = open_page("bundle")
    expect(page.locator("#bundle .facts .wide dd")).to_contain_text(new)
    for words in (
        "quickstart",
        old,
        "previous",
        "two_tower",
        "rows as int8",
        "retrieval",
        "exported without a gate",
    ):
        expect(page.locator("#bundle")).to_contain_text(words)


@pytest.mark.services
def test_without_a_token_the_page_says_so_and_takes_one(open_page: Open) -> None:
    page = open_page(token="")
    expect(page.locator("#down")).to_contain_text("This server requires a token")
    page.locator("#token").fill(READER)
    page.locator("#token").press("Tab")
    expect(page.locator("#serving")).to_contain_text("quickstart")
    expect(page.locator("#down")).to_be_hidden()
    assert page.evaluate("localStorage.getItem('token')") is None


@pytest.mark.services
def test_rollback_asks_first_and_needs_the_admin_token(
    open_page: Open, two_versions: tuple[Path, str, str], address: str
) -> None:
    _, old, new = two_versions
    page = open_page("bundle")
    page.get_by_role("button", name=f"Roll back to {old}").click()
    expect(page.get_by_role("dialog")).to_contain_text(old)
    page.get_by_role("button", name="Keep serving").click()
    expect(page.locator("#bundle .facts .wide dd")).to_contain_text(new)
    page.get_by_role("button", name=f"Roll back to {old}").click()
    page.locator("#rollback-yes").click()
    expect(page.locator("#rollback-error")).to_contain_text("admin scope")
    page.keyboard.press("Escape")
    page.locator("#token").fill(ADMIN)
    page.get_by_role("button", name=f"Roll back to {old}").click()
    page.locator("#rollback-yes").click()
    expect(page.locator("#bundle .facts .wide dd")).to_contain_text(old)
    status = httpx.get(f"{address}/v1/status", headers={"Authorization": f"Bearer {ADMIN}"}).json()
    assert status["version"] == old
    page.get_by_role("button", name=f"Roll back to {new}").click()
    page.locator("#rollback-yes").click()
    expect(page.locator("#bundle .facts .wide dd")).to_contain_text(new)


@pytest.mark.services
def test_help_opens_and_closes_by_key(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#serving")).to_contain_text("quickstart")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keyboard help")).to_be_hidden()


@pytest.mark.services
@pytest.mark.parametrize(
    "view", ["", "recommend?user=x&row=1", "compare?user=x", "item?id=i1", "live", "bundle"]
)
def test_nothing_is_wider_than_a_small_phone(open_page: Open, view: str) -> None:
    page = open_page(view, viewport={"width": 360, "height": 740})
    expect(page.locator("#serving")).to_contain_text("quickstart")
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    if "row" not in view:
        assert page.evaluate("scrollY") == 0, "the top of the page is what one sees first"


@pytest.mark.services
def test_dark_follows_the_system_until_the_button_says_otherwise(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(paper) == "rgb(18, 21, 24)"
    page.locator("#theme").click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    page.reload()
    expect(page.locator("#theme")).to_have_attribute("title", "Theme: light")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"


@pytest.mark.services
def test_a_server_that_is_gone_is_said_to_be_gone_and_found_again(
    browser: Any, start: Callable[..., Any], user: str
) -> None:
    server = start()
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.http}/#recommend?user={user}")
    expect(rows_of(page)).to_have_count(20)
    server.stop()
    page.locator("#user").press("Enter")
    expect(page.locator("#down")).to_contain_text("The server does not answer")
    expect(page.locator("#recommend-table")).to_contain_text("No answer")
    start(http_port=int(server.http.rpartition(":")[2]))
    begin = time.monotonic()
    expect(rows_of(page)).to_have_count(20, timeout=15_000)
    assert time.monotonic() - begin < 15
    expect(page.locator("#down")).to_be_hidden()
    context.close()
