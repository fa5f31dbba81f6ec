"""The shop page in a real browser, against a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

expect = pytest.importorskip("playwright.sync_api").expect
Open = Callable[..., Any]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def address(start: Callable[..., Any]) -> str:
    """A server of its own: events of these tests change what it recommends."""
    return str(start().http)


def shelf(page: Any, title: str) -> Any:
    return page.locator(".shelf").filter(has=page.get_by_role("heading", name=title))


def titles(page: Any, title: str) -> list[str]:
    return list(shelf(page, title).locator(".title").all_inner_texts())


def test_a_product_that_is_viewed_changes_the_shelves_at_once(open_in_browser: Open, address: str) -> None:
    page = open_in_browser(f"{address}/shop")
    expect(shelf(page, "Recommended for you").locator(".card")).to_have_count(12)
    expect(shelf(page, "Trending now").locator(".card")).to_have_count(12)
    expect(shelf(page, "Recommended for you").locator(".why").first).not_to_be_empty()
    first = shelf(page, "Recommended for you").locator(".card").first
    viewed = first.locator(".title").inner_text()
    first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(viewed)
    expect(page.get_by_role("heading", name=f"Because you viewed {viewed}")).to_be_visible()
    expect(page.locator("#changed")).to_contain_text("recommendations are new")
    assert titles(page, "You viewed lately")[0] == viewed
    assert viewed not in titles(page, "Recommended for you")
    assert viewed not in titles(page, "Similar items")


def test_search_finds_titles_and_says_when_there_are_none(open_in_browser: Open, address: str) -> None:
    page = open_in_browser(f"{address}/shop")
    page.get_by_role("searchbox").fill("LAMP")
    page.keyboard.press("Enter")
    expect(page.locator("#found .card").first).to_be_visible()
    assert all("lamp" in title.lower() for title in page.locator("#found .title").all_inner_texts())
    page.get_by_role("searchbox").fill("o'brien's")
    page.keyboard.press("Enter")
    expect(page.locator("#found")).to_contain_text("Nothing found for \u201co'brien's\u201d")


def test_a_new_visitor_on_a_phone_starts_with_what_is_popular(open_in_browser: Open, address: str) -> None:
    page = open_in_browser(f"{address}/shop", **PHONE)
    page.get_by_label("Shopping as").select_option("new")
    expect(shelf(page, "Popular with everybody").locator(".card")).to_have_count(12)
    shelf(page, "Popular with everybody").locator(".card").first.tap()
    viewed = page.get_by_role("heading", level=1).inner_text()
    expect(page.get_by_role("heading", name=f"Because you viewed {viewed}")).to_be_visible()
    expect(shelf(page, "Recommended for you").locator(".card")).to_have_count(12)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_shop_uses_the_public_api_alone(open_in_browser: Open, address: str) -> None:
    asked: list[str] = []
    page = open_in_browser("about:blank")
    page.on("request", lambda request: asked.append(request.url.removeprefix(address)))
    page.goto(f"{address}/shop")
    expect(shelf(page, "Trending now")).to_be_visible()
    files = {"/shop", "/shop/shop.js", "/shop/style.css", "/console/page.js", "/console/icon.svg"}
    documented = set(httpx.get(f"{address}/openapi.json").json()["paths"])
    assert set(asked) - files <= documented
