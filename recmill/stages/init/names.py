"""Column names that reveal a role, as `plain_name` gives them: lower case, without punctuation."""

from __future__ import annotations


def words(*texts: str) -> tuple[str, ...]:
    """`"user uid"` -> ("user", "uid")."""
    return tuple(word for text in texts for word in text.split())


# Groups in order of preference: the first group that matches any column wins.
USERS = (
    words("user userid uid useridx userkey"),
    words(
        "visitorid customerid custid memberid reviewerid accountid clientid buyerid playerid personid profileid",
        "subscriberid shopperid listenerid viewerid readerid msno",
    ),
    words(
        "visitor customer member reviewer account client buyer player person profile subscriber shopper username"
    ),
    words("sessionid session deviceid cookieid cookie anonymousid"),
)
_NOUNS = words(
    "product movie film book article track song video content business place poi venue location recipe game app news",
    "show course good goods offer ad listing hotel restaurant artist anime post job podcast stream beer tweet page",
    "album playlist creative banner",
)
ITEMS = (
    words("item itemid iid itemidx itemkey"),
    (
        *(f"{noun}id" for noun in _NOUNS),
        *words("prodid isbn isbn13 asin sku stockcode productcode itemno itemcode ean"),
    ),
    (*_NOUNS, *words("parentasin url")),
    words("title itemname productname movietitle artistname trackname"),
)
TIMES = (
    words(
        "timestamp time ts datetime eventtime unixreviewtime unixtime clickedat createdat ratedat timems",
        "eventtimestamp",
    ),
    words("date day eventdate reviewtime reviewdate timecreated invoicedate orderdate purchasedate"),
)
TIME_ENDS = ("time", "timestamp", "date", "at")
ORDERS = words("position order seq sequence step index rank timestep eventno eventnumber orderno")

RATINGS = words(
    "rating ratings score stars star overall bookrating userrating movierating reviewscore reviewrating starrating",
    "preference vote grade rate",
)
CLICKS = words("click clicked isclick isclicked")
LABELS = words(
    "label like liked islike purchase purchased ispurchase bought converted conversion target positive engaged watched",
    "installed ordered response feedback y",
)
EVENTS = words(
    "event eventtype action actiontype behavior behaviour behaviortype interaction interactiontype activity type"
)
NEGATIVE_EVENTS = words(
    "impression impressions shown show exposure exposed skip skipped dislike hide ignored"
)
VIEW_EVENTS = words("view views pv pageview")
CLICK_EVENTS = words("click clicks clicked")

# Columns known at request time. Other columns may be outcomes, such as is_like, which would leak the label.
CONTEXTS = words(
    "device platform browser hour weekday dayofweek page position slot rank country region city language locale",
    "channel source referrer campaign placement tab section network connection price discount",
)

USER_FILES = words("user customer member account visitor client reviewer person people profile")
ITEM_FILES = ("item", *_NOUNS)

# Other common header words.
_OTHERS = words("genre genres category brand price name age")
KNOWN = tuple(
    name
    for group in (*USERS, *ITEMS, *TIMES, ORDERS, RATINGS, CLICKS, LABELS, EVENTS, _OTHERS)
    for name in group
)
