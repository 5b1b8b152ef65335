"""Small documents, written byte by byte, so that no package that reads them has written them."""

import io
import zipfile


def zip_of(files):
    """A zip file of a dict from names to contents."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return raw.getvalue()


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
