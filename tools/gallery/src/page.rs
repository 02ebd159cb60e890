//! The page: hand-written text with generated parts between comments.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, bail, ensure};

use crate::rows::{line_error, missing};

const START: &str = "`<!-- gallery: NAME -->`";
const END: &str = "`<!-- /gallery -->`";

/// A generated part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Line of its first marker, counted from 1.
    pub line: u64,
    /// The name in that marker.
    pub name: String,
    /// The bytes between the lines of its markers.
    pub body: Range<usize>,
}

/// Finds the generated parts of a page. Code blocks are hand-written text.
pub fn blocks(path: &Path, text: &str) -> Result<Vec<Block>> {
    let wrong = |line: u64, expected: &str, got: &str| line_error(path, line, expected, got);
    let mut blocks = Vec::new();
    let mut open: Option<(u64, &str, usize)> = None;
    let (mut end, mut is_code) = (0, false);
    for (line, raw) in (1..).zip(text.split_inclusive('\n')) {
        let start = end;
        end += raw.len();
        let trimmed = raw.trim();
        if open.is_none() && ["```", "~~~"].iter().any(|fence| trimmed.starts_with(fence)) {
            is_code = !is_code;
        }
        let Some(comment) = comment(trimmed).filter(|_| !is_code) else { continue };
        match comment.strip_prefix("gallery:").map(str::trim) {
            Some(name) if !name.is_empty() => {
                if let Some((first, ..)) = open {
                    bail!(wrong(line, &format!("{END} for line {first}"), trimmed));
                }
                open = Some((line, name, end));
            }
            None if comment == "/gallery" => match open.take() {
                Some((line, name, body)) => blocks.push(Block { line, name: name.to_owned(), body: body..start }),
                None => bail!(wrong(line, &format!("{START} before {END}"), "none")),
            },
            _ => bail!(wrong(line, &format!("{START} or {END}"), trimmed)),
        }
    }
    if let Some((line, name, _)) = open {
        bail!(wrong(line, &format!("{END} after `<!-- gallery: {name} -->`"), "the end of the page"));
    }
    ensure!(!blocks.is_empty(), missing(path, START, "a page without it"));
    Ok(blocks)
}

/// The page with its generated parts replaced.
pub fn replaced<'e>(text: &str, bodies: impl IntoIterator<Item = (&'e Block, &'e str)>) -> String {
    let (mut page, mut from) = (String::new(), 0);
    for (block, body) in bodies {
        page.push_str(&text[from..block.body.start]);
        page.push_str(body);
        from = block.body.end;
    }
    page.push_str(&text[from..]);
    page
}

/// The content of a line that is a gallery comment; empty if the comment does not end.
fn comment(line: &str) -> Option<&str> {
    let comment = line.strip_prefix("<!--")?.trim_start();
    let is_ours = comment.starts_with("gallery") || comment.starts_with("/gallery");
    is_ours.then(|| comment.strip_suffix("-->").unwrap_or_default().trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Title\n\n<!-- gallery: niah a -->\nold\n<!-- /gallery -->\nprose\n\n```md\n\
        <!-- gallery: shown -->\n```\n<!-- gallery:error-by-density  b-->\n<!-- /gallery -->";

    fn error(text: &str) -> String {
        blocks(Path::new("page.md"), text).expect_err("an error").to_string()
    }

    #[test]
    fn generated_parts_are_found_and_replaced_and_nothing_else() {
        let blocks = blocks(Path::new("page.md"), PAGE).expect("blocks");
        let found: Vec<_> = blocks.iter().map(|block| (block.line, block.name.as_str())).collect();
        assert_eq!(found, [(3, "niah a"), (11, "error-by-density  b")]);
        assert_eq!(&PAGE[blocks[0].body.clone()], "old\n");
        let page = replaced(PAGE, blocks.iter().zip(["new\nlines\n", "more\n"]));
        assert_eq!(page, PAGE.replace("old\n", "new\nlines\n").replace("b-->\n", "b-->\nmore\n"));
    }

    #[test]
    fn lines_end_in_both_ways() {
        let text = PAGE.replace('\n', "\r\n");
        let blocks = blocks(Path::new("page.md"), &text).expect("blocks");
        assert_eq!(&text[blocks[0].body.clone()], "old\r\n");
    }

    #[test]
    fn markers_that_do_not_match_are_refused() {
        assert_eq!(
            error("a\n<!-- gallery: niah a -->\ntext\n"),
            "page.md, line 2: expected `<!-- /gallery -->` after `<!-- gallery: niah a -->`, got the end of the page"
        );
        assert_eq!(
            error("<!-- gallery: niah a -->\n<!-- gallery: niah b -->\n<!-- /gallery -->\n"),
            "page.md, line 2: expected `<!-- /gallery -->` for line 1, got <!-- gallery: niah b -->"
        );
        assert_eq!(
            error("\n<!-- /gallery -->\n"),
            "page.md, line 2: expected `<!-- gallery: NAME -->` before `<!-- /gallery -->`, got none"
        );
        for malformed in ["<!-- gallery niah a -->", "<!-- gallery: -->", "<!-- gallery: niah", "<!-- /gallery: a -->"]
        {
            let expected = "page.md, line 1: expected `<!-- gallery: NAME -->` or `<!-- /gallery -->`, got ";
            assert_eq!(error(malformed), format!("{expected}{malformed}"));
        }
        assert_eq!(error("prose"), "page.md: expected `<!-- gallery: NAME -->`, got a page without it");
    }
}
