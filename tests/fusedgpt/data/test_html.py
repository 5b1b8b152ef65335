"""The text of HTML pages: what a reader sees, in the encoding that they say."""

import re

import pytest
from hypothesis import given, settings, strategies

from fusedgpt.data import documents
from fusedgpt.data.corpus import Files

PAGE = """<!DOCTYPE html><html><head><title>Not here</title><style>p {color: red}</style>
<script>document.write("<p>nor this</p>")</script></head><body>
<nav><ul><li>Home<li>Contact</ul></nav><div role="navigation">Menu <div>within</div> a menu</div>
<h1>A  head-
line &amp; caf&eacute;</h1><p>One <b>bold</b>ness.<br>Two<p>Three &copy &#8212; x<ul><li>a<li>b</ul>
<form><button>Send</button><select><option>1</select></form><!-- a remark -->
<table><tr><th>x<th>y<tr><td>1</td><td>2</td></tr></table><pre>def f():
    return 1</pre><p>after</p></body></html>"""
READ = """A head- line & café

One boldness.
Two

Three © — x

a
b

x\ty
1\t2

def f():
    return 1

after"""


def text_of(path, raw=None, **options):
    """The one document in a file."""
    if raw is not None:
        path.write_bytes(raw)
    fragments = list(Files([path], **options).fragments())
    assert [last for _, last in fragments] == [False] * (len(fragments) - 1) + [True]
    return "".join(text for text, _ in fragments)


@pytest.mark.parametrize("size", [1, 3, 10, 10**6])
def test_html_is_what_a_reader_of_the_page_sees(size):
    blocks = (PAGE[at : at + size] for at in range(0, len(PAGE), size))
    assert "".join(documents.html_text("a", blocks, pytest.fail)) == READ


MENU = "<ul><li>Home<li><a>Contact</a></ul>"
UNCLOSED = [
    (f"<div>one<nav>{MENU}<p>menu</div><p>two", "nav"),
    (f"<header>one<div><nav><nav>{MENU}</nav></div></header>two", "nav"),
    ("<p>one <button>Send <b>now</b></p>two", "button"),
    ("<table><td>one<td><select><option>A</table>two", "select"),
    (f"<div>one<div role=navigation>{MENU}<div>menu</div></div>two", None),  # or the last </div> is missing
    ("one<p role=navigation>two<h1 role=navigation>three</h1>", None),
    (f"one<nav>{MENU}</span></a></x></body></html>", "nav"),  # it is open to the end
    (f"<p>one<br><p>one<nav></br></span>{MENU}<p>menu<p>menu</p></nav>two", None),
]


@pytest.mark.parametrize(("page", "tag"), UNCLOSED)
def test_an_element_without_its_end_tag_does_not_drop_the_rest_in_silence(tmp_path, capsys, page, tag):
    # one <nav> or <button> without its end, or <p role=navigation>, dropped the rest of the page
    words = re.findall("one|two|three", page)
    assert text_of(tmp_path / "a.html", page.encode()).split() == words
    said = capsys.readouterr().out
    assert (f"a.html, which has a <{tag}> without its </{tag}>" in said) if tag else not said


UNSEEN = [
    "one<div hidden>Cookies? <div>Yes</div></div>two",
    'one<section style="color: red; DISPLAY:none !important">Cookies?</section>two',
    'one <span style="visibility: hidden">no <span>no</span></span> two',
    "<body style='visibility:hidden'>one<input hidden> two</body>",  # scripts show such a page
    "one<dialog>Cookies?</dialog><dialog open>two</dialog>",
    "one<math><semantics><annotation encoding='application/x-tex'>x</annotation></semantics></math> two",
    "<ruby>one<rp>(</rp><rt>wan</rt><rp>)</rp></ruby> <ruby>two<rt>tu</ruby>",
    "one<video><p>Your browser is too old</video><audio>too</audio><canvas>too</canvas>two",
    "<p>one<p hidden>no<p>two<p style='display:none'>no<div>three</div>",
    "<ul><li>one<li hidden>no<ul><li>no</ul><li>two<li hidden>no</ul>three",
    "<table><tr><td>one<tr hidden><td>no<table><tr><td>no</table><tr><td>two<td hidden>no</table>three",
    "<p style='display: nonesuch'>one<p class=hidden>two",
]


@pytest.mark.parametrize("page", UNSEEN)
def test_what_browsers_do_not_show_is_left_out(tmp_path, capsys, page):
    # saved pages keep the banners that were hidden by the time they were saved
    words = re.findall(r"\b(?:one|two|three)\b", page)
    assert text_of(tmp_path / "a.html", page.encode()).split() == words
    assert not capsys.readouterr().out


WORDS = strategies.sampled_from(["one", "zwei", "drôle", "四", "5 < 6", "a&b", "&amp;", "&lt;p&gt;"])
TREES = strategies.recursive(
    WORDS.map(lambda word: ("", [word])),
    lambda inner: strategies.tuples(
        strategies.sampled_from(["div", "p", "b", "li", "td", "script", "nav", "style", "template"]),
        strategies.lists(inner, max_size=4),
    ),
    max_leaves=12,
)


def written(tree, out=True):
    """The HTML of a tree, and the words in it that a reader sees."""
    tag, children = tree
    if not tag:
        word = children[0]
        return f" {word.replace('&', '&amp;').replace('<', '&lt;')} ", word.split() if out else []
    if tag in ("script", "style"):  # their text is no HTML
        return f"<{tag}>var a = '<p>';</{tag}>", []
    parts = [written(child, out and tag not in ("nav", "template")) for child in children]
    return f"<{tag}>{''.join(each for each, _ in parts)}</{tag}>", [word for _, words in parts for word in words]


@given(TREES, strategies.integers(1, 40))
@settings(max_examples=200, deadline=None, database=None)
def test_every_word_of_html_is_read_once_and_in_order(tree, size):
    page, words = written(tree)
    blocks = (page[at : at + size] for at in range(0, len(page), size))
    assert "".join(documents.html_text("a", blocks, pytest.fail)).split() == words


@pytest.mark.parametrize(
    ("head", "encoding", "text"),
    [
        ('<meta charset="iso-8859-1">', "latin-1", "naïve"),
        ("<META http-equiv=Content-Type content='text/html; charset=windows-1252'>", "cp1252", "naïve"),
        ("<!-- <meta charset=latin-1> --><meta charset=utf-8>", "utf-8", "naïve"),  # these two were read as Latin-1
        ('<meta name=description content="encoding=latin-1"><meta charset=utf-8>', "utf-8", "naïve"),
        ("", "utf-8", "naïve"),
        ("", "utf-8-sig", "naïve"),
        ("", "utf-16", "naïve"),
        ('<meta charset="utf-8">', "utf-16", "naïve"),  # the BOM counts more
        # as browsers understand what it says: quotation marks became control characters, and other pages were refused
        ("<meta charset=ISO-8859-1>", "cp1252", "“it’s”"),
        ("<meta charset=us-ascii>", "cp1252", "“it’s”"),
        ("<meta charset=gb2312>", "gbk", "朱镕基"),
        ("<meta charset=shift_jis>", "cp932", "①"),
        ("<meta charset=ks_c_5601-1987>", "cp949", "똠방각하"),
        ("<meta charset=utf-16>", "utf-8", "“it’s”"),
        ("<meta charset=utf-16le>", "utf-8", "“it’s”"),  # all of the page, with its tags, became Chinese characters
    ],
)
def test_html_is_decoded_as_it_says(tmp_path, head, encoding, text):
    page = f"<html>{head}<p>{text}</html>"
    assert text_of(tmp_path / "a.htm", page.encode(encoding)) == text


def test_html_that_is_not_in_what_it_says_is_read_in_the_encoding_that_is_given(tmp_path, capsys):
    # the error said to add --encoding=cp1252, which changed nothing
    wrong = b"<html><meta charset=utf-8><p>caf\xe9</html>"
    assert text_of(tmp_path / "a.html", wrong, encoding="cp1252") == "café"
    assert "as cp1252, because it is not utf-8" in capsys.readouterr().out
    right = "<html><meta charset=gbk><p>朱镕基</html>".encode("gbk")
    assert text_of(tmp_path / "b.html", right, encoding="cp1252") == "朱镕基"
