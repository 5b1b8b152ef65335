"""Small documents of every kind, written byte by byte, so that no package that reads them has written them."""

import io
import zipfile

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
ODF = "urn:oasis:names:tc:opendocument:xmlns"


def zipped(**files):
    """A zip file. A name has / for __ and . for _: word__document_xml is word/document.xml."""
    return zip_of({name.replace("__", "/").replace("_", "."): content for name, content in files.items()})


def zip_of(files):
    """A zip file of a dict from names to contents."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return raw.getvalue()


def docx(body, name="word/document.xml"):
    """A Word file with the XML `body`, or with a paragraph for each text of a list."""
    if isinstance(body, list):
        body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in body)
    xml = f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?><w:document {W}><w:body>{body}</w:body></w:document>'
    return zip_of({"[Content_Types].xml": "<Types/>", name: xml})


def odt(body):
    """An OpenDocument text with the XML `body`."""
    names = "".join(f' xmlns:{name}="{ODF}:{name}:1.0"' for name in ("office", "text", "table"))
    xml = f"<office:document-content{names}><office:body><office:text>{body}</office:text></office:body>"
    kind = "application/vnd.oasis.opendocument.text"
    return zip_of({"mimetype": kind, "content.xml": f"{xml}</office:document-content>"})


def epub(chapters, extra=None):
    """An EPUB. `chapters` are (name, content, properties), in the order of reading; they are stored in another."""
    items = "".join(
        f'<item id="i{n}" href="{name}" media-type="application/xhtml+xml"{" " * bool(more)}{more}/>'
        for n, (name, _, more) in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="i{n}"/>' for n in range(len(chapters)))
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
    )
    files = {f"OEBPS/{name.replace('%20', ' ')}": content for name, content, _ in reversed(chapters)}
    start = {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "OEBPS/book.opf": package}
    return zip_of(start | files | (extra or {}))


def pdf(pages, image=""):
    """A PDF with a line of text on each page; a page of None has none. Each page has the `image`, in gray."""
    first = 4  # the number of the first object that is of a page
    kids = " ".join(f"{first + 3 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    gray = f"/Subtype/Image/Width {len(image)}/Height 1/BitsPerComponent 8/ColorSpace/DeviceGray"
    for n, text in enumerate(pages):
        at = first + 3 * n
        content = ("" if text is None else f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET") + " /I Do"
        resources = f"<</Font<</F1 3 0 R>>/XObject<</I {at + 2} 0 R>>>>"
        objects += [
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources{resources}/Contents {at + 1} 0 R>>",
            f"<</Length {len(content)}>>stream\n{content}\nendstream",
            f"<</Type/XObject{gray}/Length {len(image)}>>stream\n{image}\nendstream",
        ]
    raw, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(raw))
        raw += f"{number} 0 obj\n{each}\nendobj\n".encode("cp1252")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer<</Size {len(objects) + 1}/Root 1 0 R>>\n"
    return raw + f"{end}startxref\n{len(raw)}\n%%EOF\n".encode()
