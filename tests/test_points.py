"""Landmarks in the files of other programs: read where they are, and written back into a copy."""
import json
import re

import numpy as np
import pytest

import OM_register
from Dataloader.nifti import write_field
from Dataloader.points import point_files, read_point_pairs, read_points, write_points
from Runtime.errors import InputError

# Two landmarks in RAS, as each program writes them.
RAS = [[10.5, 12.25, -3.5], [1, 2, 3]]
HEADER = "# Markups fiducial file version = 4.11\n# CoordinateSystem = {}\n# columns = id,x,y,z,ow,vis,label\n"
ROWS = "F_1,{0}10.5,{0}12.25,-3.5,1,1,\"nose, left\"\nF_2,{0}1,{0}2,3,1,0,chin\n"
CONTROL = [{"id": "1", "label": "nose", "position": [-10.5, -12.25, -3.5], "positionStatus": "defined"},
           {"id": "2", "label": "chin", "position": [-1.0, -2.0, 3.0], "positionStatus": "defined"}]
MARKUPS = json.dumps({"@schema": "x", "markups": [{"type": "Fiducial", "coordinateSystem": "LPS",
                                                   "controlPoints": CONTROL}]})
ASCII = ("# vtk DataFile Version 3.0\npoints\nASCII\nDATASET POLYDATA\nPOINTS 2 float\n-10.5 -12.25 -3.5 -1\n-2 3\n"
         "VERTICES 2 4\n1 0\n1 1\n")
BINARY = (b"# vtk DataFile Version 5.1\nvtk output\nBINARY\nDATASET POLYDATA\nFIELD FieldData 1\nSPACE 1 1 string\n"
          b"\xc3RAS\nPOINTS 2 double\n" + np.array(RAS, ">f8").tobytes() + b"\nMETADATA\nINFORMATION 0\n\n")


@pytest.mark.parametrize("text, encoding", [
    ("x;y;z\n10,5;12,25;-3,5\n1;2;3\n", "utf-8"), ("10.5,12.25,-3.5\n1,2,3\n", "utf-8"),
    ("id,x,y,z\n7,10.5,12.25,-3.5\n8,1,2,3\n", "utf-8"), ("z,y,x\n-3.5,12.25,10.5\n3,2,1\n", "utf-8"),
    ("label;X (mm);Y_mm;z\nnose;10,5;12,25;-3,5\nbrücke;1;2;3\n", "latin-1"), ("10,5 12,25 -3,5\n1 2 3\n", "utf-8"),
    ("\ufeffx,y,z\n10.5,12.25,-3.5\n\n1;2;3\n", "utf-8"),
    ('"10.5","12.25","-3.5"\n"1","2","3"\n', "utf-8"), ('"x";"y";"z"\n"10,5";"12,25";"-3,5"\n1;2;"3"\n', "utf-8"),
    ('"label","x","y","z"\n"L0, left","10,5","12.25","-3.5"\nL1, "1", 2, 3\n', "utf-8"),
    ('x,y,z,side\n10.5,12.25,-3.5,"nose, ""tip"""\n1,2,3, "a, b"\n', "utf-8"),
    ("x\ty\tz\n10,5\t12,25\t-3,5\n1\t2\t3\n", "utf-16"), ("10.5, 12.25, -3.5\n1, 2, 3\n", "utf-16-le"),
    ("x,y,z,name\n10.5,12.25,-3.5,left hip\n1,2,3,right\n", "utf-8"), ("10.5 ,12.25 ,-3.5\n1 ,2 ,3\n", "utf-8"),
    ("Z (mm),X (mm),Y (mm)\n-3.5,10.5,12.25\n3,1,2\n", "utf-8"),
    ("name;x;y;z\nleft hip;10,5;12,25;-3,5\na b;1,0;2;3\n", "utf-8")])
def test_landmarks_as_people_have_them(tmp_path, text, encoding):
    path = tmp_path / "points.csv"
    path.write_bytes(text.encode(encoding))
    assert read_points(path).tolist() == [[10.5, 12.25, -3.5], [1, 2, 3]]


@pytest.mark.parametrize("text, words", [
    ("1,10.5,12.25,-3.5\n", "row 1: 1, 10.5, 12.25, -3.5 is not x, y, z in millimetres; a header row must name"),
    ("a,b,c\n1,2,3\n", "header a, b, c does not name the columns x, y and z"),
    ("1,2,3\n1_000,2,3\n", "row 2: 1_000, 2, 3 is not x, y, z"),
    ("x,y,z\n1,2,3\n1,2\n", "row 3: 1, 2 is not x, y, z"), ("10,5,12,25,-3,5\n", "row 1: 10, 5, 12, 25, -3, 5"),
    ("1,2\n", "row 1: 1, 2 is not x, y, z"), ("1,2,3\n4,a,6\n", "row 2: 4, a, 6 is not"),
    ("x,y,z\n1,nan,3\n", "row 2"), ("", "no landmarks"), ("x,y,z\n", "no landmarks")])
def test_landmarks_that_can_be_read_in_two_ways_are_refused(tmp_path, text, words):
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(words)):
        read_points(path)


@pytest.mark.parametrize("name, content", [
    ("p.fcsv", (HEADER.format("LPS") + ROWS.format("-")).encode()),
    ("p.fcsv", (HEADER.format("0") + ROWS.format("")).encode()),
    ("p.fcsv", b"# columns = label,x,y,z\n\"nose, left\",10.5,12.25,-3.5\n\"chin\nor so\",1,2,3\n"),
    ("p.json", MARKUPS.encode()), ("p.vtk", ASCII.replace("POINTS 2 float", "points 2 FLOAT").encode()),
    ("P.FCSV", ROWS.format("").replace("12.25", "12.25 ").encode()), ("p.mrk.json", MARKUPS.encode()),
    ("p.mrk.json", MARKUPS.replace("LPS", "RAS").replace("[-10.5, -12.25", "[10.5, 12.25").replace(
        "[-1.0, -2.0", "[1, 2").encode()),
    ("p.vtk", ASCII.encode()), ("p.vtk", ASCII.replace("\npoints", "\n3D Slicer output. SPACE=RAS").replace(
        "-10.5 -12.25", "10.5 12.25").replace("-1\n-2", "1 2").encode()), ("p.vtk", BINARY)])
def test_landmarks_of_other_programs(tmp_path, name, content):
    """The copy has the moved landmarks at their places and everything else as it was."""
    source = tmp_path / name
    source.write_bytes(content)
    np.testing.assert_allclose(read_points(source), RAS)
    moved = np.array(RAS) + [[1, -2, 0.5], [0, 3, -1]]
    out = tmp_path / "out"
    out.mkdir()
    write_points(out, source, moved)
    table, copy = point_files(out, source)
    assert sorted(out.iterdir()) == sorted([table, copy]) and copy.name == f"points{name[1:].lower()}"
    np.testing.assert_allclose(read_points(copy), moved, atol=1e-6)
    np.testing.assert_allclose(read_points(table), moved, atol=1e-6)
    write_points(out, copy, RAS)
    before, after = content.strip(), copy.read_bytes().strip()
    if name.endswith("json"):
        assert json.loads(after) == json.loads(before)
    else:
        number = rb"-?\d+(\.\d+)?\s*"
        assert b"VERTICES" not in before or b"\nVERTICES 2 4\n1 0\n1 1" in after
        assert after == before or re.sub(number, b"", after) == re.sub(number, b"", before)


@pytest.mark.parametrize("name, content, words", [
    ("p.fcsv", HEADER.format("IJK").encode(), "another coordinate system than RAS and LPS"),
    ("p.fcsv", b"# columns = id,r,a,s\n1,2,3,4\n", "no columns x, y and z"),
    ("p.fcsv", b"F_1,1,2\n", "point 1, F_1, 1, 2, has no x, y, z"),
    ("p.fcsv", b"# columns = label,x,y,z,sel,vis\nC7, 5,10,20,30,1,1\n", "point 1, C7,  5, 10, 20, 30, 1, 1, has no"),
    ("p.mrk.json", MARKUPS.replace('"defined"', '"undefined"').encode(), "control point 1, nose, has no position"),
    ("p.mrk.json", MARKUPS.replace("[-1.0, -2.0, 3.0]", '""').encode(), "control point 2, chin, has no position"),
    ("p.mrk.json", MARKUPS.replace('"LPS"', '"LPS", "coordinateUnits": "cm"').encode(), "in cm; export them in mm"),
    pytest.param("p.fcsv", b'"' + 200_000 * b"a", "not a table of points", id="long .fcsv"),
    pytest.param("p.csv", b'x,y,z,id\n1,2,3,"' + 200_000 * b"a" + b'"', "not a table of points", id="long .csv"),
    ("p.csv", b"{" + 99 * b"a" + b"\n", "does not name the columns x, y and z"),
    ("p.fcsv", HEADER.format("RAS").encode(), "no landmarks"),
    ("p.mrk.json", b"[]", "not a list of Slicer's control points"),
    ("p.mrk.json", MARKUPS.replace("[-1.0, -2.0, 3.0]", "[]").encode(), "2, chin, has no position of three"),
    *(("p.mrk.json", json.dumps({"markups": [{"coordinateSystem": "RAS", "controlPoints": [{"position": position}] * 3}]
                                 }).encode(), "control point 1, without a label, has no position of three numbers")
      for position in ([1, 2, 3, 1], [1, 2], [1], 1, [[1, 2, 3]])),
    ("p.mrk.json", MARKUPS.replace("LPS", "IJK").encode(), "not a list of"), ("p.mrk.json", b"{", "not a list of"),
    ("p.vtk", b"# vtk DataFile Version 3.0\nx\nASCII\nDATASET FIELD\n", "not a legacy .vtk file with POINTS"),
    ("p.vtk", ASCII[:-30].encode(), "fewer points than its header says"), ("p.vtk", BINARY[:-60], "fewer points"),
    ("p.vtk", ASCII.replace("-2 3", "x 3").encode(), "or they are not numbers"),
    ("p.vtk", BINARY.replace(b"POINTS 2", b"POINTS 99999999999999"), "fewer points"),
    ("p.vtk", re.sub("POINTS [0-9]+", f"POINTS {10 ** 20}", ASCII).encode(), "not a legacy .vtk file with POINTS"),
    pytest.param("p.mrk.json", b"[" * 100_000, "not a list of", id="deep .mrk.json"),
    ("p.vtp", b"<VTKFile>", "landmarks are read from tables")])
def test_files_without_landmarks_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name}.*{re.escape(words)}"):
        read_points(tmp_path / name)


NAMED = "name,x,y,z\nnose,10.5,12.25,-3.5\nchin,1,2,3\n"


@pytest.mark.parametrize("name, content", [
    ("m.csv", "id;X;label;Y;Z\n1;1;chin;2;3\n2;10,5;nose;12,25;-3,5\n"),
    ("m.csv", 'x,y,z,"ID"\n1,2,3,"chin"\n10.5,12.25,-3.5,"nose"\n'),
    ("m.fcsv", HEADER.format("RAS") + "F_1,1,2,3,1,0,chin\nF_2,10.5,12.25,-3.5,1,1,nose\n"),
    ("m.mrk.json", json.dumps({"markups": [{"controlPoints": CONTROL[::-1]}]}))])
def test_landmarks_of_two_files_are_paired_by_name(tmp_path, name, content):
    (tmp_path / "f.csv").write_text(NAMED)
    (tmp_path / name).write_text(content)
    assert read_points(tmp_path / name).tolist() == RAS[::-1], "alone, in the order of the file"
    for points_mm in read_point_pairs(tmp_path / "f.csv", tmp_path / name):
        assert points_mm.tolist() == RAS


@pytest.mark.parametrize("text", ["x,y,z\n4,5,6\n7,8,9\n", "name,x,y,z\nM-1,4,5,6\nM-2,7,8,9\n",
                                  "name,x,y,z\nchin,4,5,6\n,7,8,9\n",
                                  "name,x,y,z\nnose,4,5,6\nchin 2,7,8,9\n"])
def test_landmarks_without_the_same_names_are_paired_by_row(tmp_path, text):
    (tmp_path / "f.csv").write_text(NAMED)
    (tmp_path / "m.csv").write_text(text)
    assert read_point_pairs(tmp_path / "f.csv", tmp_path / "m.csv")[1].tolist() == [[4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("names, said", [(("chin", "Nose"), "chin"), (("nose", "nose"), "nose")])
def test_names_that_stand_in_other_rows_and_do_not_all_match_are_told(tmp_path, names, said, capsys):
    (tmp_path / "f.csv").write_text(NAMED)
    (tmp_path / "m.csv").write_text("name,x,y,z\n{},1,2,3\n{},4,5,6\n".format(*names))
    assert read_point_pairs(tmp_path / "f.csv", tmp_path / "m.csv")[1].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert f"m.csv are paired by row, although names such as {said} stand in different rows" in capsys.readouterr().err


def test_a_field_is_applied_to_points_of_slicer(tmp_path, capsys):
    field = np.zeros((3, 5, 6, 7), np.float32)
    field[0] = 2
    write_field(tmp_path / "field.nii.gz", field, np.eye(4))
    (tmp_path / "points.fcsv").write_text(HEADER.format("LPS") + ROWS.format("-"))
    words = ["--apply", str(tmp_path / "field.nii.gz"), "--points", str(tmp_path / "points.fcsv"), "--out"]
    assert OM_register.main([*words, str(tmp_path)]) == 43
    assert "points.fcsv: a result with the same name would overwrite this input or result" in capsys.readouterr().err
    assert OM_register.main([*words, str(tmp_path / "out")]) == 0
    for name in ("points.csv", "points.fcsv"):
        np.testing.assert_allclose(read_points(tmp_path / "out" / name), np.array(RAS) + [2, 0, 0])
    assert "F_2,-3.000000,-2.000000,3.000000,1,0,chin" in (tmp_path / "out/points.fcsv").read_text()
