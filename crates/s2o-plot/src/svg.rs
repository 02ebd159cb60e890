//! A [`Scene`] as an SVG document.

use std::fmt::Write;

use super::palette::PAPER;
use super::scene::{Anchor, Point, Scene, Shape, Text};
use super::typeface::FAMILY;

pub fn document(scene: &Scene) -> String {
    let (width, height) = (scene.width, scene.height);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"{FAMILY}\" stroke-linecap=\"square\" \
         stroke-linejoin=\"round\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"{PAPER}\"/>\n"
    );
    for shape in &scene.shapes {
        // Writing to a string cannot fail.
        let _ = element(&mut svg, shape);
    }
    svg + "</svg>\n"
}

fn element(svg: &mut String, shape: &Shape) -> std::fmt::Result {
    match shape {
        Shape::Area { rect, colour } => {
            let [x, y, width, height] = [rect.left, rect.top, rect.width(), rect.height()].map(number);
            writeln!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{colour}\"/>")
        }
        Shape::Polygon { corners, colour } => {
            writeln!(svg, "<polygon points=\"{}\" fill=\"{colour}\"/>", points(corners))
        }
        Shape::Circle { centre, radius, colour } => {
            let [x, y, r] = [centre.0, centre.1, *radius].map(number);
            writeln!(svg, "<circle cx=\"{x}\" cy=\"{y}\" r=\"{r}\" fill=\"{colour}\"/>")
        }
        Shape::Path { points: path, colour, width, dash } => {
            let (path, width) = (points(path), number(*width));
            write!(svg, "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"")?;
            if let Some((on, off)) = dash.map(|(on, off)| (number(on), number(off))) {
                write!(svg, " stroke-dasharray=\"{on} {off}\" stroke-linecap=\"butt\"")?;
            }
            svg.write_str("/>\n")
        }
        Shape::Text(line) => text(svg, line),
    }
}

fn text(svg: &mut String, line: &Text) -> std::fmt::Result {
    let [x, y, em] = [line.at.0, line.at.1, line.em].map(number);
    write!(svg, "<text x=\"{x}\" y=\"{y}\" font-size=\"{em}\" fill=\"{}\"", line.colour)?;
    match line.anchor {
        Anchor::Start => {}
        Anchor::Middle => svg.write_str(" text-anchor=\"middle\"")?,
        Anchor::End => svg.write_str(" text-anchor=\"end\"")?,
    }
    if line.bold {
        svg.write_str(" font-weight=\"bold\"")?;
    }
    if line.upwards {
        write!(svg, " transform=\"rotate(-90 {x} {y})\"")?;
    }
    writeln!(svg, ">{}</text>", line.content.replace('&', "&amp;").replace('<', "&lt;"))
}

fn points(points: &[Point]) -> String {
    points.iter().map(|&(x, y)| format!("{},{}", number(x), number(y))).collect::<Vec<_>>().join(" ")
}

/// A length to a hundredth of a pixel.
fn number(pixels: f64) -> String {
    let text = format!("{pixels:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}
